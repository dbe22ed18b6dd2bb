"""What LEMA adds to the disk beside transformers and PEFT: bytes of fresh virtual environments,
without torch's.

    python benchmarks/installed.py             # an environment under the directory of temporary files; some minutes
    python benchmarks/installed.py --parts     # and each package that LEMA alone brings

torch and what it requires are installed first and not counted. Bytecode counts, as pip writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = {
    "torch": ["torch"],
    "transformers and PEFT": ["transformers", "peft"],
    "lema-lora": [str(ROOT)],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        folder = next(Path(place).glob("lib/python*/site-packages"))
        sizes = [_sizes(folder)]
        for packages in STEPS.values():
            command = [
                f"{place}/bin/pip",
                "install",
                "-q",
                "-c",
                str(ROOT / "constraints.txt"),
                *packages,
            ]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
            sizes.append(_sizes(folder))
    totals = [sum(each.values()) for each in sizes]
    _, theirs, all_of_it = (total - totals[1] for total in totals[1:])
    print(
        json.dumps({"date": datetime.now(UTC).date().isoformat(), "python": sys.version.split()[0]})
    )
    print("| installed beside torch | MB | of transformers and PEFT |\n|---|---|---|")
    for name, nbytes in (("transformers and PEFT", theirs), ("lema-lora", all_of_it)):
        print(f"| {name} | {nbytes / 1e6:.1f} | {nbytes / theirs:.2f} |")
    if arguments.parts:
        added = {name: size - sizes[2].get(name, 0) for name, size in sizes[3].items()}
        for name, nbytes in sorted(added.items(), key=lambda pair: -pair[1]):
            if nbytes > 100_000:
                print(f"| {name} | {nbytes / 1e6:.1f} | {nbytes / theirs:.3f} |")


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each folder and file of an environment's packages."""
    return {
        each.name: sum(
            file.lstat().st_size for file in (each.rglob("*") if each.is_dir() else [each])
        )
        for each in folder.iterdir()
    }


if __name__ == "__main__":
    main()
