"""KV cache bookkeeping; the data itself lies in the executor. Read pool.py first, then prefix.py, table.py and manager.py,
which applies the layout rules on top of them."""
