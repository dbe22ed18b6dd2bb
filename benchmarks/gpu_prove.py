"""Run `lema prove` on a device, and keep its certificate, also where it says that the numbers differ.

    python benchmarks/gpu_prove.py --device cuda --out prove.json

It is the same as `lema prove --device cuda`, for a device that only another package makes known too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from gpu_software import what_is_missing  # the rest is imported once nothing is missing

TINY = ("--steps", "1", "--micro-batches", "1", "--tokens", "16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="LEMA's name for it")
    parser.add_argument("--tiny", action="store_true", help="one short step, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("prove.json"), help="a file for the certificate")
    options = parser.parse_args()
    if missing := what_is_missing(options.device):
        raise SystemExit("\n".join(missing))
    from gpu_device import announce

    from lema.cli import main as lema

    announce()
    with tempfile.TemporaryDirectory() as directory:
        sys.argv = ["lema", "prove", "--device", options.device, "--output", directory]
        sys.argv += TINY if options.tiny else ()
        try:
            lema()
        finally:
            certificate = Path(directory) / "certificate.json"
            if certificate.exists():
                shutil.copyfile(certificate, options.out)


if __name__ == "__main__":
    main()
