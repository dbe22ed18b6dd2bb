"""Models and adapters as GGUF, the format of llama.cpp, and the `Modelfile` of Ollama.

llama.cpp's own programs convert; nothing of them is here. docs/gguf.md is the page for users.
"""
