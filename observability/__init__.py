"""kvscope: says why the P99 of an LLM inference service is bad. Start at docs/architecture.md."""
