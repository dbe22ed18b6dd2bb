"""Qwen3 235B, with experts, on a GPU with 24 GB and a disk: prints the README's row.

python runs/qwen3_235b_24gb.py            # --tiny: a small model on the CPU
"""

from row import main

if __name__ == "__main__":
    main("Qwen3-235B-A22B", 24)
