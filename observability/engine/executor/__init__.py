"""What runs step plans and moves KV blocks: torch_executor.py on a real model, virtual.py in virtual time. Both implement types.Executor.

Real time: read torch_executor.py first, then kv_cache.py (where keys and values lie) and attention.py; compressed_kv.py adds quantized blocks
(quantizer.py; comparison.py compares them with exact ones while serving), latent_kv.py is for latent attention. block_moves.py moves
blocks (block_set.py describes them) and host_blocks.py is the host tier's memory; timing.py, rates.py and overlap.py measure, sampling.py
picks tokens.

Virtual time: read virtual.py first. Its models of time are roofline.py, from the records in hardware.py, and calibrated.py, fitted to
this machine.
"""
