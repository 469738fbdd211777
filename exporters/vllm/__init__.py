"""kvscope inside vLLM: a stat-logger plug-in that an unmodified vLLM loads, and a reader of its KV events.

plugin.py: the class that vLLM instantiates. recorder.py: from vLLM's statistics to kvscope's families. frontend.py: requests on
their way in and out, aborts included. exposition.py: onto vLLM's own /metrics. capabilities.py: what vLLM can tell and what not.
"""
