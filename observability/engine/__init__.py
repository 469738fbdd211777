"""The bundled inference engine: continuous batching over a paged KV cache with prefix reuse.

Read types.py first (the nouns and all settings), then engine.py (one step: schedule, execute, commit), scheduler.py (who runs, with the
orders of batching.py and the expectations of arrivals.py), kv/ (who holds which block), executor/ (what runs a step: torch in real time,
roofline or a calibration in virtual time) and loop.py (the thread that steps a live engine). controller.py moves the scheduler's limits;
settings.py reads settings from text.

In front of it: server.py (the OpenAI-compatible API), sessions.py (KV of conversations that outlives a replica) and router.py (one address
for several replicas). docs/engine.md says what each mechanism is for.
"""
