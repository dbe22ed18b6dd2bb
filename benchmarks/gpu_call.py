"""One call of gpu.py: it writes models, starts and ends processes, keeps the time, and writes
every row down.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from common import Shape, machine
from gpu_arms import Job, installed
from gpu_model import MODELS, TINY, Written, available_memory, places_for, remove, write_random
from gpu_plan import CAPS, CONTEXT, PLAN, TINY_CAPS, Run, host_bytes, operations, peft_bytes
from gpu_process import Child, Failed, Refused
from gpu_rounds import Measured, measure
from gpu_software import versions

__all__ = ["Call"]

RESERVE = 15.0  # seconds at the end, for the table
ANSWER = 150.0  # seconds that anything a child is asked may take
PROOF = 120.0  # seconds that `lema prove` may take


class Call:
    """Everything one call measures.

    Args:
        arguments: of the command line.
        began: the moment from which its time is counted; None: now.

    Attributes:
        results: as they are written.
    """

    def __init__(self, arguments: argparse.Namespace, began: float | None = None) -> None:
        self.arguments = arguments
        self._began = time.monotonic() if began is None else began
        self._scratch = Path(tempfile.mkdtemp(prefix="lema-gpu-", dir=arguments.directory))
        self._written: dict[str, Written] = {}
        self._references: dict[str, Child | None] = {}
        self._arm: Child | None = None  # of LEMA, kept for the next row
        self._arm_about: dict[str, Any] = {}
        self.tokens = arguments.tokens or (16 if arguments.tiny else 1024)
        self.results: dict[str, Any] = {"rows": [], "flops_per_second": {}, "models": {}}
        if arguments.resume and arguments.out.exists():
            self.results = json.loads(arguments.out.read_text())
            self.results["rows"] = [
                row for row in self.results["rows"] if row["status"] == "measured"
            ]
        self.results |= {
            "benchmark": "gpu",
            "machine": machine(),
            "versions": versions(),
            "real": arguments.device != "cpu" and not arguments.tiny,
            "tokens_per_micro_batch": self.tokens,
            "rank": arguments.rank,
        }

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the call has to be over."""
        return self.arguments.seconds - RESERVE - self.elapsed

    def run(self) -> None:
        """Measure everything, or as much as there is time for."""
        self._measure_machine()
        if not self.arguments.rows_only:
            self._prove()
        for planned in self._planned():
            self._measure(planned)
            self.save()

    def close(self) -> None:
        """End every process, delete the models, write what there is."""
        for child in (self._arm, *self._references.values()):
            if child is not None:
                child.close()
        remove(self._scratch)
        self.save()

    def save(self) -> None:
        """Write the results."""
        self.results["seconds"] = self.elapsed
        out: Path = self.arguments.out
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(out)

    def _planned(self) -> Iterator[Run]:
        options = self.arguments
        for run in PLAN:
            wanted = options.only is None or any(
                fnmatchcase(run.name, pattern) for pattern in options.only
            )
            counts = [count for count in run.micro_batches if count in options.micro_batches]
            missing = tuple(count for count in counts if not self._has(run, count))
            if wanted and missing and run.model in options.models:
                yield replace(run, micro_batches=missing)

    def _measure_machine(self) -> None:
        """Measure the link, the rate of matrix products, and parity, in one process."""
        tiny = self.arguments.tiny
        shapes = {
            name: asdict(shape)
            for name, shape in self._shapes.items()
            if name in self.arguments.models
        }
        job = Job(
            "machine",
            "",
            TINY["8B"],
            self.arguments.device,
            None,
            self.tokens,
            self.arguments.rank,
            "",
        )
        child = Child(job)
        try:
            child.ready(self._patience(60))
            if "link" not in self.results:
                self.results["link"] = child.ask(
                    "link", self._patience(60), nbytes=(1 << 20) if tiny else (1 << 29)
                )
            for name, shape in shapes.items():
                if name not in self.results["flops_per_second"]:
                    rate = child.ask("matmul", self._patience(60), shape=shape, tokens=self.tokens)
                    self.results["flops_per_second"][name] = rate["flops_per_second"]
            self.save()
            if "parity" not in self.results and not self.arguments.rows_only:
                size = (
                    {"layers": 8, "hidden": 64, "tokens": 16}
                    if tiny
                    else {"layers": 12, "hidden": 512, "tokens": 64}
                )
                self.results["parity"] = child.ask("parity", self._patience(90), **size)
        except Failed as error:
            self.results.setdefault("errors", []).append(f"machine: {error}")
        finally:
            child.close()
            self.save()

    def _prove(self) -> None:
        """Run `lema prove` on the device, in a process of its own, and keep its certificate."""
        if "certificate" in self.results:
            return
        command = ["-m", "lema", "prove", "--device", self.arguments.device]
        command += (
            ["--steps", "1", "--micro-batches", "1", "--tokens", "16"]
            if self.arguments.tiny
            else []
        )
        patience = self._patience(PROOF)
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=self._scratch,
                capture_output=True,
                text=True,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            self.results.setdefault("errors", []).append(f"lema prove: no end in {patience:.0f} s")
            return
        # also where it says that the numbers differ
        if (certificate := self._scratch / "lema-proof" / "certificate.json").exists():
            self.results["certificate"] = json.loads(certificate.read_text())
        else:
            said = f"{done.stdout}{done.stderr}".strip().splitlines()[-6:]
            self.results.setdefault("errors", []).append(f"lema prove: {' | '.join(said)}")
        self.save()

    @property
    def _shapes(self) -> dict[str, Shape]:
        return TINY if self.arguments.tiny else MODELS

    def _measure(self, run: Run) -> None:
        """Measure the rows of a run; what goes wrong is in them."""
        remaining = list(run.micro_batches)
        if not installed(run.arm):
            return self._tell(run, remaining, "not installed")
        while remaining and self.left > 0:
            child = None
            try:
                job = self._job(run)
                reference = self._reference(run, remaining)
                child, about = self._child(run, job)
                while remaining and self.left > 0 and not child.ended:
                    self._measure_with(child, reference, run, remaining.pop(0), about)
            # of building it: nothing is to be had with fewer micro-batches either
            except Failed as error:
                self._tell(run, remaining, "failed", str(error))
                return None
            finally:
                if child is not None and child is not self._arm:
                    child.close()
        return self._tell(run, remaining, "not reached")

    def _child(self, run: Run, job: Job) -> tuple[Child, dict[str, Any]]:
        """Return the process of an arm, and what it says of itself.

        LEMA's goes on from one cap to the next: starting one, and reading the weights, takes as
        long as a row does.

        Raises:
            Failed: the arm could not be built.
        """
        kept = self._arm
        if kept is not None and not kept.ended and replace(kept.job, cap=job.cap) == job:
            kept.limit(job.cap)
            return kept, self._arm_about
        if kept is not None:
            kept.close()
            self._arm = None
        child = Child(job)
        try:
            about = child.ready(self._patience())
        except Failed:
            child.close()
            raise
        if run.arm == "lema":
            self._arm = child
            self._arm_about = about
        return child, about

    def _measure_with(
        self, child: Child, reference: Child | None, run: Run, count: int, about: dict[str, Any]
    ) -> None:
        """Measure one row. A child that failed ends with it."""
        options = self.arguments
        try:
            found = measure(
                child,
                reference if reference is not None and not reference.ended else None,
                count,
                options.rounds,
                min(options.row_seconds, self.left),
                self._patience,
            )
            self._row(run, count, found, about)
        except Refused as error:
            self._tell(run, [count], "does not fit", str(error))
        except Failed as error:
            self._tell(
                run,
                [count],
                "does not fit" if "OutOfMemory" in str(error) else "failed",
                str(error),
            )
        self.save()

    def _patience(self, most: float = ANSWER) -> float:
        return max(1.0, min(most, self.left))

    def _job(self, run: Run) -> Job:
        """Return the job of a run, its model written.

        Raises:
            Failed: there is no room for the model, or host memory would not hold what the arm
                needs.
        """
        try:
            written = self._model(run.model, on_disk=run.strategy == "streaming")
        except OSError as error:
            raise Failed(f"the weights cannot be written: {error}") from error
        options = self.arguments
        needed = host_bytes(run, written.shape)
        free = self._host_memory
        if needed > free and not self._holds(run):
            why = (
                f"about {needed / 1e9:.0f} GB of host memory are needed, {free / 1e9:.0f} are free"
            )
            raise Failed(
                f"{why}; where memory grows on demand, say with --host-memory how many GB "
                "there may be"
            )
        return Job(
            arm=run.arm,
            model=str(written.directory),
            shape=written.shape,
            device=options.device,
            cap=None if run.cap_gib is None else (TINY_CAPS if options.tiny else CAPS)[run.cap_gib],
            tokens=self.tokens,
            rank=options.rank,
            scratch=str(self._scratch),
            strategy=run.strategy or "resident",
        )

    def _model(self, name: str, *, on_disk: bool = False) -> Written:
        """Return a model on its files, written now if need be; another's go where both find no
        room.
        """
        key = f"{name}-disk" if on_disk else name
        if key not in self._written:
            began = time.monotonic()
            shape = self._shapes[name]
            places = places_for(shape, self._scratch, self._host_memory, disk_only=on_disk)
            if sum(place.room for place in places) < shape.weight_bytes:
                for other in list(self._written):
                    remove(self._scratch, self._written.pop(other))
                places = places_for(shape, self._scratch, self._host_memory, disk_only=on_disk)
            self._written[key] = written = write_random(self._scratch / key, shape, places)
            self.results["models"][key] = {
                "shape": asdict(written.shape),
                "of_layers": written.full_layers,
                "bytes_by_place": written.where,
                "seconds": time.monotonic() - began,
            }
        return self._written[key]

    @property
    def _host_memory(self) -> int:
        """Bytes of host memory that can still be taken, or what the caller says."""
        said = self.arguments.host_memory
        return available_memory() if said is None else int(said * 1e9)

    def _holds(self, run: Run) -> bool:
        """Whether LEMA's process has the weights of a run's model in host memory already."""
        arm = self._arm
        if arm is None or arm.ended or run.arm != "lema":
            return False
        return (
            arm.job.model == str(self._written[run.model].directory)
            and arm.job.strategy == run.strategy
        )

    def _reference(self, run: Run, counts: Sequence[int]) -> Child | None:
        """Return PEFT with a run's model on the device, to take turns with; None: it could not be
        had.

        Where the device has no room for two such models and another arm's cap, the other model
        goes. Where it has none for this model and the cap, PEFT's rows are measured first, by PEFT
        alone.
        """
        if run.model in self._references:
            return self._references[run.model]
        held = [model for model, child in self._references.items() if child is not None]
        if not self._has_room(run, held):
            for model in held:
                self._end_reference(model)
        beside = self._has_room(run)
        peft = Run(run.model, "peft", None, ())
        known = all(self._has(peft, count) for count in counts)
        child = None if known and not beside else self._started_reference(run.model, counts)
        self._references[run.model] = child
        if child is not None and not beside:
            self._measure_reference(run.model, child, counts)
            child.close()
            self._references[run.model] = None
        return self._references[run.model]

    def _end_reference(self, model: str) -> None:
        if (child := self._references.pop(model)) is not None:
            child.close()

    def _has_room(self, run: Run, others: Sequence[str] = ()) -> bool:
        """Whether the device holds PEFT with a run's model and with others, and beside them the
        largest cap planned.
        """
        link = self.results.get("link", {})
        if link.get("device_memory") is None or link.get("shared"):
            return True
        caps = [planned.cap_gib or 0 for planned in self._planned() if planned.model == run.model]
        needed = sum(peft_bytes(self._shapes[model], self.tokens) for model in (run.model, *others))
        room: bool = needed + (max(caps, default=0) << 30) + CONTEXT < link["device_memory"]
        return room

    def _started_reference(self, model: str, counts: Sequence[int]) -> Child | None:
        run = Run(model, "peft", None, ())
        child = None
        try:
            child = Child(self._job(run))
            child.ready(self._patience())
            return child
        except Failed as error:
            if child is not None:
                child.close()
            self._tell(run, counts, "failed", str(error))
            return None

    def _measure_reference(self, model: str, child: Child, counts: Sequence[int]) -> None:
        """Measure PEFT's rows where it does not take turns with anything."""
        run = Run(model, "peft", None, ())
        for count in counts:
            if self.left > 0 and not child.ended and not self._has(run, count):
                self._measure_with(child, None, run, count, {"capped": False})

    def _row(self, run: Run, count: int, found: Measured, about: dict[str, Any]) -> None:
        """Add the row of an arm, and PEFT's where it is not there yet."""
        link = self.results.get("link", {}).get("page-locked", {}).get("up")
        rate = self.results["flops_per_second"].get(run.model)
        shape = self._written[
            f"{run.model}-disk" if run.strategy == "streaming" else run.model
        ].shape
        tokens = count * self.tokens
        work = tokens * operations(shape, self.tokens)
        row = found.row(tokens, work, rate, link)
        if (
            found.reference is None
            and (alone := self._measured(Run(run.model, "peft", None, ()), count)) is not None
        ):
            row |= {"ratio": alone["seconds"] / row["seconds"], "in_turn": False}
            row["loss_off"] = abs(row["losses"][-1] / alone["losses"][-1] - 1)
        self._add(
            run,
            count,
            {"status": "measured", "capped": about["capped"], "layers": shape.layers, **row},
        )
        peft = Run(run.model, "peft", None, ())
        if found.reference is not None and not self._has(peft, count):
            row = found.reference.row(tokens, work, rate, link)
            self._add(
                peft, count, {"status": "measured", "capped": False, "layers": shape.layers, **row}
            )

    def _has(self, run: Run, count: int) -> bool:
        return self._row_of(run, count) is not None

    def _measured(self, run: Run, count: int) -> dict[str, Any] | None:
        row = self._row_of(run, count)
        return row if row is not None and row["status"] == "measured" else None

    def _row_of(self, run: Run, count: int) -> dict[str, Any] | None:
        """Return the row of a run and a number of micro-batches; None: there is none yet."""
        wanted = (run.model, run.arm, run.cap_gib, run.strategy, count)
        names = ("model", "arm", "cap_gib", "strategy", "micro_batches")
        return next(
            (row for row in self.results["rows"] if tuple(row[name] for name in names) == wanted),
            None,
        )

    def _tell(self, run: Run, counts: Sequence[int], status: str, why: str = "") -> None:
        for count in counts:
            self._add(run, count, {"status": status, "why": why})

    def _add(self, run: Run, count: int, row: dict[str, Any]) -> None:
        full = self._shapes[run.model].layers
        about = {
            "model": run.model,
            "arm": run.arm,
            "cap_gib": run.cap_gib,
            "strategy": run.strategy,
            "micro_batches": count,
            "layers": full,
            "of_layers": full,
        }
        self.results["rows"].append({**about, **row})
        said = row.get("why", "")
        if row["status"] == "measured":
            said = f"{row['tokens_per_second']:,.0f} tokens/s"
        head = (
            f"{self.elapsed:5.0f} s  {run.model} {run.arm} {run.cap_gib or '-'} GiB, {count} "
            "micro-batches"
        )
        print(f"{head}: {row['status']}  {said}"[:400], file=sys.stderr, flush=True)
