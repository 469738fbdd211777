"""What the vLLM plug-in (exporters/vllm) cannot feed, or only in part: everything not named here it feeds as the bundled engine does.

A signal named here with status no has no series at all from the plug-in, never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporters.adapters.capability import Capability, no, partial
from observability.signals import BY_NAME

_ADDRESSES = no("vLLM does not hand out where blocks lie in memory")
_TOKENS = no("vLLM hands out the share of blocks in use, not the tokens in them")
_BY_PART: tuple[tuple[str, Capability], ...] = (
    ("kvscope_kv_region", _ADDRESSES),
    ("kvscope_kv_free_runs", _ADDRESSES),
    ("kvscope_kv_external_fragmentation", _ADDRESSES),
    ("kvscope_kv_internal_fragmentation", _TOKENS),
    ("kvscope_kv_stored_tokens", _TOKENS),
    ("kvscope_kv_layout_blocks", no("layouts of blocks are a matter of kvscope's engine")),
    ("kvscope_kv_quantization", no("vLLM does not measure the error of stored KV")),
    ("kvscope_step_seconds", no("vLLM does not hand out its time by step component")),
    (":kvscope_request_phase_seconds:", partial("states only: what the engine did meanwhile is not handed out")),
)

CAPABILITIES: Mapping[str, Capability] = {
    name: next(found for part, found in _BY_PART if part in name)
    for name in BY_NAME
    if any(part in name for part, _ in _BY_PART)
}
