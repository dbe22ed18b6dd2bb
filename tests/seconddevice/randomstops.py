"""Stops of runs on the second device at random times: `python tests/seconddevice/randomstops.py
--count 100`.

Of each it is counted how many layers were visited between the signal and its handler: at most one
may have been begun. The newest checkpoint must be that of the last step which was taken, and the
run that goes on from there must end with the bytes of a run that nobody stopped.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [
        str(TESTS),
        str(TESTS / "support"),
        str(TESTS.parent),
        str(TESTS.parent / "backends"),
    ]

import pytest  # noqa: E402
import seconddevice  # noqa: E402 - once the path has it
from smallrun import adapter_of, same, settings, token_rows, write_model  # noqa: E402

from lema import LemaConfig, LemaModel, LemaTrainer  # noqa: E402
from lema.engine.engine import Engine  # noqa: E402
from lema.errors import Stopped  # noqa: E402
from lema.train.stop import StopOnSignal  # noqa: E402

STEPS = 3
BETWEEN = "between the layers"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 1, "lora_dropout": 0.1},
    {"gradient_checkpointing": False, "micro_batch_size": 2},
    {"boundary_activations": "host", "gradient_accumulation_steps": 2},
)


@dataclass
class Seen:
    """What happened between a signal and its handler."""

    begin: Callable[[], object]  # called before the first visit of a layer
    visits: int = 0  # of layers that have begun so far
    under_way: str = BETWEEN
    steps: int = 0  # of the optimizer that were taken
    sent_at: int | None = None  # by how many visits had begun; None: it was not sent
    sent_in: str = ""
    handled_at: int | None = None

    @property
    def visits_between(self) -> int | None:
        """How many visits began between the two; None: the run ended before the signal."""
        return (
            None
            if self.sent_at is None or self.handled_at is None
            else self.handled_at - self.sent_at
        )


@contextmanager
def counted(seen: Seen) -> Iterator[None]:
    """Count visits of layers and steps of the optimizer, and note when the handler of a stop is
    called.
    """
    leased = Engine.leased
    note = StopOnSignal._note
    step = LemaTrainer._step_or_drop

    @contextmanager
    def counting(engine: Engine, layer: int, way: Any) -> Iterator[Any]:
        if seen.visits == 0:
            seen.begin()
        seen.visits += 1
        seen.under_way = f"in a {way}"
        try:
            with leased(engine, layer, way) as lease:
                yield lease
        finally:
            seen.under_way = BETWEEN

    def noting(stop: StopOnSignal, number: int, frame: FrameType | None) -> None:
        seen.handled_at = seen.visits
        note(stop, number, frame)

    def stepping(trainer: LemaTrainer, *args: Any, **kwargs: Any) -> Any:
        dropped = step(trainer, *args, **kwargs)
        seen.steps = trainer.global_step
        return dropped

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "leased", counting)
        patched.setattr(StopOnSignal, "_note", noting)
        patched.setattr(LemaTrainer, "_step_or_drop", stepping)
        yield


def trained(
    config: LemaConfig, stop: StopOnSignal | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Run to the end, or raise `Stopped`; return the adapter."""
    model = LemaModel(config)
    try:
        model.initialize_lora()
        model.get_trainer().fit(
            token_rows(30), resume=resume, stop=None if stop is None else stop.why
        )
        return adapter_of(model.skeleton)
    finally:
        model.close()


class Stops:
    """Runs of one way that are stopped, and the run that they are compared with.

    Args:
        place: of the model and of what runs write.
        way: settings of the runs.
    """

    def __init__(self, place: Path, way: dict[str, Any]) -> None:
        self._place = place
        self._way = {"device": "second", "max_steps": STEPS, **way}
        if not (place / "model").exists():
            write_model(place / "model")
        self._number = 0
        trained(self._config("warm"))
        began: list[float] = []
        with counted(Seen(lambda: began.append(time.monotonic()))):
            self._whole = trained(self._config("whole"))
        self._seconds = time.monotonic() - began[0]

    def _config(self, name: str) -> LemaConfig:
        return settings(self._place / "model", self._place / name, **self._way)

    def stopped(self, number: signal.Signals, draw: random.Random) -> tuple[str, Seen]:
        """Stop a run by a signal at a time that `draw` chooses; return what is wrong with it, or
        nothing, and what was seen. A run that ends before the signal is made again."""
        seen, kept, config = self._attempt(number, draw)
        while kept is None:
            seen, kept, config = self._attempt(number, draw)
        return self._fault(config, seen, kept), seen

    def _attempt(
        self, number: signal.Signals, draw: random.Random
    ) -> tuple[Seen, int | None, LemaConfig]:
        """Return what was seen, the step of the checkpoint that the run stopped with (None: it came
        to its end), and its settings."""
        self._number += 1
        config = self._config(f"cut-{self._number}")

        def send() -> None:
            seen.sent_at = seen.visits
            seen.sent_in = seen.under_way
            os.kill(os.getpid(), number)

        timer = threading.Timer(draw.uniform(0.0, self._seconds), send)
        seen = Seen(timer.start)
        kept = None
        with counted(seen), StopOnSignal() as stop:
            try:
                trained(config, stop)
            except Stopped as error:
                kept = int(Path(error.where).name.removeprefix("checkpoint-"))
            timer.cancel()
            timer.join()
        return seen, kept, config

    def _fault(self, config: LemaConfig, seen: Seen, kept: int) -> str:
        if seen.visits_between is None or seen.visits_between > 1:
            return f"{seen.visits_between} layers were begun between the signal and its handler"
        if kept != seen.steps:
            return f"the checkpoint is of step {kept}, and {seen.steps} were taken"
        if not same(trained(config, resume=True), self._whole):
            return "the adapter of the run that went on is another"
        return ""


def main(arguments: list[str]) -> int:
    """Stop as many runs as are asked for; return 1 if any ended otherwise than it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    seconddevice.install()
    draw = random.Random(given.seed)
    failures = 0
    places = Counter[str]()
    most = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lema-stops-") as directory:
        for index, way in enumerate(WAYS):
            cases = range(index, given.count, len(WAYS))
            stops = Stops(Path(directory) / str(index), way) if cases else None
            for case in cases:
                assert stops is not None
                number = SIGNALS[case // len(WAYS) % len(SIGNALS)]
                fault, seen = stops.stopped(number, draw)
                places[seen.sent_in] += 1
                most = max(most, seen.visits_between or 0)
                failures += bool(fault)
                said = fault or f"{seen.visits_between} layers begun before the handler"
                sys.stderr.write(f"{number.name} {seen.sent_in}, {way}: {said}\n")
    where = ", ".join(f"{count} {place}" for place, count in sorted(places.items()))
    sys.stdout.write(
        f"{given.count - failures} of {given.count} stops as they must be ({where}); at "
        f"most {most} layers begun "
        f"between a signal and its handler; {time.monotonic() - began:.0f} s\n"
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
