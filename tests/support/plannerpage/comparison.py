"""Compares the planner's page in a browser with `lema plan`, in as many processes as there are cores.

    PYTHONPATH=.:backends:tools:tests/support python -m plannerpage.comparison COUNT FOLDER [pasted]

The folder keeps what was compared, one file for each combination, and a later call goes on behind
them. It is no longer right when lema/plan or the page has changed: delete it then.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers.utils import logging

from plannerpage.browser import answers_of
from plannerpage.combinations import combinations, pasted
from plannerpage.reference import figures_of, relative_differences
from plannerpage.write import known_families, known_models

__all__ = ["WITHIN", "Compared", "compared"]

WITHIN = 0.01  # how far a figure may be from the plan's, relative to it


@dataclass(frozen=True)
class Compared:
    """A combination, and how far the page's figures are from the plan's."""

    inputs: dict[str, Any]
    fits: bool  # whether the page says so
    error: str  # of the page's scripts; empty: there is none
    differences: dict[str, float]  # of each figure, relative to the plan's

    @property
    def far(self) -> dict[str, float]:
        """The figures that are too far from the plan's."""
        return {name: far for name, far in self.differences.items() if far > WITHIN}


def compared(
    chosen: Sequence[dict[str, Any]], folder: Path, *, processes: int | None = None
) -> Iterator[Compared]:
    """Compare each combination, those first that take least long.

    `lema plan` takes minutes for steps of many tokens that do not fit, because it tries a head in
    pieces on all chunks of a micro-batch, and for linear attention, which goes over long rows piece
    by piece: models with several kinds of layers come last.
    """
    models = known_models()
    kinds = {name: max(facts["kinds"]) for name, facts in models.items()}
    ordered = sorted(
        chosen,
        key=lambda inputs: (kinds.get(inputs["model"], 0), inputs["rows"] * inputs["length"]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")  # because torch's threads do not survive a fork
    with ProcessPoolExecutor(processes or os.cpu_count(), context) as pool:
        yield from pool.map(_of_combination, ordered, [folder] * len(ordered))


def _of_combination(inputs: dict[str, Any], folder: Path) -> Compared:
    """Compare a combination; what was compared before is read."""
    file = folder / f"{_key(inputs)}.json"
    if not file.exists():
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        (answer,) = answers_of([inputs], file.with_suffix(".html"))
        result = _compare(inputs, answer, folder)
        file.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return Compared(**json.loads(file.read_text(encoding="utf-8")))


def _compare(inputs: dict[str, Any], page: dict[str, Any], folder: Path) -> Compared:
    if "error" in page:
        return Compared(inputs, fits=False, error=page["error"], differences={})
    plan = figures_of(inputs, page.get("yaml"), folder / "checkpoints")
    return Compared(inputs, page["fits"], "", relative_differences(page, plan))


def _key(inputs: dict[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def main(count: int, folder: Path, kind: str = "") -> None:
    """Compare so many combinations, of published models or of `pasted` sizes, and say how far each
    is.
    """
    number = 0
    wrong = 0
    chosen = combinations(known_models(), count)
    if kind == "pasted":
        chosen = pasted(known_families(), count)
    for result in compared(list(chosen), folder):
        number += 1
        wrong += bool(result.far or result.error)
        worst = max(result.differences.items(), key=lambda entry: entry[1], default=None)
        about = [str(result.inputs[name]) for name in ("model", "form", "objective", "length")]
        mark = f"WRONG {result.inputs} {result.far} {result.error}"
        text = mark if result.far or result.error else ""
        sys.stdout.write(f"{number} {' '.join(about)} {result.fits} {worst} {text}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{number} compared, {wrong} wrong\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
