"""Weights, tokenizer and decoder. Read loading.py first; llama.py is the decoder, fetch.py gets the default model."""
