"""Qwen3 8B on a GPU with 8 GB: prints the README's row.

python runs/qwen3_8b_8gb.py            # --tiny: a small model on the CPU
"""

from row import main

if __name__ == "__main__":
    main("Qwen3-8B", 8)
