"""KV cache bookkeeping; the data itself lies in the executor.

Read pool.py first (who holds which block), then prefix.py (what is cached), device.py (exact and quantized blocks as one), table.py (one
sequence's blocks) and manager.py, which applies the layout rules on top of them and moves blocks. compaction.py plans moves that make adjacent
room, host.py is the second tier in host memory. codec.py and snapshot.py are formats of KV that leaves the device. measure.py has what
telemetry publishes and the invariants that tests check; residency.py keeps how long cached content lives, and what was evicted.
"""
