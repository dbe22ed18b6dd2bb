"""Qwen3 32B on a GPU with 24 GB: prints the README's row.

python runs/qwen3_32b_24gb.py            # --tiny: a small model on the CPU
"""

from row import main

if __name__ == "__main__":
    main("Qwen3-32B", 24)
