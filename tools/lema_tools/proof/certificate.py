"""The certificate: what two runs have in common, by number, as JSON and as Markdown."""

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lema.backend.findings import program_versions
from lema.config.markdown import code
from lema.config.units import human_bytes, human_count
from lema.errors import LemaError
from lema.storage.atomic import replace_file
from lema.storage.regular import check_kind, check_target
from lema_tools.proof.arms import Case, Outcome

__all__ = ["PromiseBroken", "certify", "markdown", "tolerance", "write"]

ROUNDING = 1e-5  # in fp32, where products have other shapes, or other kernels compute them
PACKAGES = "torch", "transformers", "peft", "safetensors", "numpy"


class PromiseBroken(LemaError):
    """The numbers of a streamed run are not those of the whole model."""

    exit_code = 7


@dataclass(frozen=True)
class Compared:
    """Tensors of both runs: how many, how many of them are the same bit by bit, and how far the
    others are apart.
    """

    count: int
    bitwise: int
    largest: float  # absolute difference of any element
    relative: float  # the norm of the difference of all together by the norm of the whole model's
    missing: list[str]  # names that only one of the runs has

    @property
    def same(self) -> bool:
        """Whether all are there in both, and the same bit by bit."""
        return self.count == self.bitwise and self.count > 0 and not self.missing


def tolerance(device: str, dtype: str, *, cut: bool = False) -> float:
    """Return how far norms may be apart, relative: 0, bitwise, in fp32 on the processor; elsewhere
    rounding, because other kernels may be taken: 1e-5 in fp32, and in half precision 2**-8, the
    distance of two bf16 numbers near 1. Rows that are `cut` into chunks round on the processor,
    too."""
    if dtype != "float32":
        return 2.0**-8
    on_processor = device.partition(":")[0] == "cpu"
    return 0.0 if on_processor and not cut else ROUNDING


def compared(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Compared:
    """Compare tensors by name; a NaN is like no other number."""
    shared_names = sorted(actual.keys() & expected.keys())
    pairs = [(actual[name], expected[name]) for name in shared_names]
    fitting = [(mine, theirs) for mine, theirs in pairs if mine.shape == theirs.shape]
    differences = [mine.double() - theirs.double() for mine, theirs in fitting]
    largest = max(
        (float(difference.abs().max()) for difference in differences if difference.numel()),
        default=0.0,
    )
    norm = sum(float(theirs.double().square().sum()) for _, theirs in fitting) ** 0.5
    missing = sorted(actual.keys() ^ expected.keys()) + [
        name
        for name, (mine, theirs) in zip(shared_names, pairs, strict=True)
        if mine.shape != theirs.shape
    ]
    return Compared(
        len(shared_names),
        sum(mine.dtype == theirs.dtype and torch.equal(mine, theirs) for mine, theirs in fitting),
        largest,
        sum(float(difference.square().sum()) for difference in differences) ** 0.5 / (norm or 1.0),
        missing,
    )


def certify(case: Case, streamed: Outcome, reference: Outcome, command: str) -> dict[str, Any]:
    """Return the certificate as plain JSON types; `holds` says whether the promise does."""
    details = streamed.details
    allowed = tolerance(details.get("device", case.device), case.dtype, cut=case.is_cut)
    gradients, adapter = (
        compared(getattr(streamed, field), getattr(reference, field))
        for field in ("gradients", "adapter")
    )
    losses = [
        {"step": at, "streamed": mine, "whole": theirs, "difference": abs(mine - theirs)}
        for at, (mine, theirs) in enumerate(
            zip(streamed.losses, reference.losses, strict=True), start=1
        )
    ]
    bitwise = (
        gradients.same and adapter.same and all(row["streamed"] == row["whole"] for row in losses)
    )
    near = (
        all(
            comparison.count and not comparison.missing and comparison.relative <= allowed
            for comparison in (gradients, adapter)
        )
        and all(row["difference"] <= allowed * abs(row["whole"]) for row in losses)
        and len(losses) == case.steps
    )
    planned = sum(
        size
        for part, size in details["plan"].items()
        if streamed.memory["before"] or part.startswith("device")
    )
    return {
        "holds": bitwise if allowed == 0 else near,
        "bitwise": bitwise,
        "tolerance": allowed,
        "losses": losses,
        "gradients_of_first_step": asdict(gradients),
        "adapter_after_last_step": asdict(adapter),
        "memory": {
            "of": "the process" if streamed.memory["before"] else "the device",
            "streamed": streamed.memory,
            "whole": reference.memory,
            "planned_peak": streamed.memory["before"] + planned,
            "plan": details["plan"],
        },
        "seconds": {"streamed": streamed.seconds, "whole": reference.seconds},
        "model": {key: details[key] for key in MODEL},
        "bytes_read_per_step": details["bytes_read_per_step"],
        "case": {key: value for key, value in asdict(case).items() if key != "scratch"},
        "machine": _machine(details["device"]),
        "versions": {"python": platform.python_version(), **program_versions(*PACKAGES)},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
    }


MODEL = (
    "model_type",
    "parameters",
    "adapter_parameters",
    "layers",
    "slots",
    "layer_bytes",
    "model_bytes",
)


def _machine(device: str) -> dict[str, Any]:
    about = {"cores": psutil.cpu_count(logical=True), "memory": psutil.virtual_memory().total}
    return {"system": f"{platform.system()} {platform.machine()}", "device": device, **about}


TITLE = "# Streamed, and whole: one certificate"
BEGINS = {"certificate.json": b'{\n "holds": ', "certificate.md": TITLE.encode()}


def check_replaceable(directory: Path) -> None:
    """Make sure that a certificate replaces at most another one in a directory. `ConfigError`: it
    would replace what is none."""
    for name, begins in BEGINS.items():
        check_target(directory / name)
        check_kind(directory / name, begins)


def write(certificate: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write `certificate.json` and `certificate.md` to a directory, and return where."""
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / "certificate.json", directory / "certificate.md"
    replace_file(files[0], (json.dumps(certificate, indent=1) + "\n").encode())
    replace_file(files[1], ("\n".join(markdown(certificate)) + "\n").encode())
    return files


def markdown(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the certificate as people read it."""
    case = certificate["case"]
    model = certificate["model"]
    memory = certificate["memory"]
    yield TITLE
    yield ""
    yield f"**{_verdict(certificate)}**"
    yield ""
    about = f"{model['layers']} layers and {human_count(model['parameters'])} parameters"
    rows = f"{case['micro_batches']} rows with {case['tokens']} tokens"
    adapter = f"{human_count(model['adapter_parameters'])} parameters, rank {case['rank']}"
    yield (
        f"A {code(model['model_type'])} with {about} was trained for {case['steps']} steps of "
        f"{rows},"
    )
    yield (
        f"in {case['dtype']} on `{certificate['machine']['device']}`: once by LEMA, "
        f"{model['slots']} layers in memory"
    )
    yield (
        "at a time, and once by `transformers` and PEFT with the whole model, with the same "
        "rows, seed and adapter"
    )
    yield f"({adapter})."
    if (chunk := case["sequence_chunk"]) is not None and chunk < case["tokens"]:
        yield (
            f"In the streamed run rows went through each layer in chunks of {chunk:,} tokens. That "
            f"rounds otherwise, so numbers may differ by {certificate['tolerance']:.1g}, relative."
        )
    if case["rope_parameters"] is not None:
        yield f"Both had `rope_parameters: {json.dumps(case['rope_parameters'])}`."
    yield ""
    yield "| step | loss, streamed | loss, whole | difference |"
    yield "|---|---|---|---|"
    for row in certificate["losses"]:
        yield (
            f"| {row['step']} | {row['streamed']:.9g} | {row['whole']:.9g} | "
            f"{row['difference']:.2g} |"
        )
    yield ""
    yield "| tensors | compared | the same bit by bit | largest difference | relative |"
    yield "|---|---|---|---|---|"
    for name in ("gradients_of_first_step", "adapter_after_last_step"):
        comparison = certificate[name]
        cells = (
            comparison["count"],
            comparison["bitwise"],
            f"{comparison['largest']:.2g}",
            f"{comparison['relative']:.2g}",
        )
        yield f"| {name.replace('_', ' ')} | {' | '.join(map(str, cells))} |"
    yield ""
    yield f"| memory of {memory['of']} | streamed | whole |"
    yield "|---|---|---|"
    arms = memory["streamed"], memory["whole"]
    for name, key in (("before the model was opened", "before"), ("at the peak", "peak")):
        yield f"| {name} | {' | '.join(human_bytes(arm[key]) for arm in arms)} |"
    yield f"| the plan had for the peak | {human_bytes(memory['planned_peak'])} | |"
    yield (
        f"| weights of the model | {human_bytes(model['model_bytes'])} | "
        f"{human_bytes(model['model_bytes'])} |"
    )
    yield (
        f"| weights read in a step | {human_bytes(int(certificate['bytes_read_per_step']))} | "
        "none |"
    )
    yield ""
    machine = certificate["machine"]
    yield (
        f"Machine: {machine['system']}, {machine['cores']} cores, "
        f"{human_bytes(machine['memory'])} of memory."
    )
    yield (
        "Versions: "
        f"{', '.join(f'{name} {number}' for name, number in certificate['versions'].items())}."
    )
    yield f"Date: {certificate['date']}. Command: {code(certificate['command'])}"


def _verdict(certificate: Mapping[str, Any]) -> str:
    if not certificate["holds"]:
        return "The numbers are not the same: the promise does not hold here."
    if certificate["bitwise"]:
        count = certificate["gradients_of_first_step"]["count"]
        return (
            f"The numbers are bitwise the same: every loss, all {count} gradients, and the "
            "adapter after the last step."
        )
    return (
        f"The numbers are the same within {certificate['tolerance']:.1g}, relative, which is "
        "rounding."
    )
