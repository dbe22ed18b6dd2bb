"""Weights stored in a quantised form, in the formats of the libraries that quantise them:
torchao and bitsandbytes.
"""
