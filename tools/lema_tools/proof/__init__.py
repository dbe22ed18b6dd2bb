"""The comparison of a streamed run with `transformers` and PEFT on the whole model, and the
certificate of it.
"""
