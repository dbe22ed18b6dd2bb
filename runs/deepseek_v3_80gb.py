"""DeepSeek-V3, as it is published, on a GPU with 80 GB and a disk: prints the README's row.

python runs/deepseek_v3_80gb.py            # --tiny: a small model on the CPU
"""

from row import main

if __name__ == "__main__":
    main("DeepSeek-V3", 80)
