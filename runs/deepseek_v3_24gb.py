"""DeepSeek-V3, as it is published, on a GPU with 24 GB and a disk: prints the README's row.

python runs/deepseek_v3_24gb.py            # --tiny: a small model on the CPU
"""

from row import main

if __name__ == "__main__":
    main("DeepSeek-V3", 24)
