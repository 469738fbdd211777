"""What runs step plans: torch_executor.py on a real model, roofline.py in virtual time. Both implement types.Executor."""
