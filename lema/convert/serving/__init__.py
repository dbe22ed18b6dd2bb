"""Adapters in the layouts that servers read: vLLM, SGLang."""
