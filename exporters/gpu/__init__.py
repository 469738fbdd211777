"""GPU health: what NVML or DCGM-exporter say of each GPU, as families of the catalogue, with a score and its reasons.

Read reading.py first (what is read, by name), then nvml.py and dcgm.py (two sources of it), health.py (the table of findings) and
sampler.py (the thread that reads, and what a scrape sees of it).
"""
