"""Weights that are stored quantised, in the formats of the libraries that quantise them: torchao and bitsandbytes."""
