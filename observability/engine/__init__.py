"""The bundled inference engine: continuous batching over a paged KV cache with prefix reuse.

Read types.py first (the nouns), then engine.py (one step: schedule, execute, commit), scheduler.py (who runs), kv/ (who holds which
block), executor/ (what runs a step: torch in real time, roofline in virtual time) and loop.py (the thread that steps a live engine).
"""
