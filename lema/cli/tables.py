"""A plan, shown to a reader: a table on a terminal, tab-separated lines elsewhere; and as a
picture.

The picture shows the seconds of a step over its tokens, and from how many tokens on compute hides
the transfer of weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lema.config.printing import print_table
from lema.config.units import MEMORY_PARTS, human_bytes, human_count, human_duration, human_rate
from lema.errors import ConfigError, DiskError, installing
from lema.plan import Plan
from lema.plan.plan import BOTTLENECKS, MOST_ADAPTERS, plan_with, step_curve
from lema.plan.planner import Planner

if TYPE_CHECKING:
    from lema.data.dataset import TokenDataset
    from lema.data.preference import PreferenceDataset

__all__ = ["draw", "rows", "show_plan", "show_run"]

SUMS = ("in all", "tokens of full rows", "takes", "tokens per second", "costs")
# What is said of a step that was timed; small models are not worth the time that this takes.
TIMED = {"takes", "limited by", "computing", "on the link", "on the disk", "tokens per second"}
TIMED |= {f"waiting for {what}" for what in ("the disk", "the link", "activations")}

LONG_ROWS = "a long row"

Row = tuple[str, str, str]


def rows(plan: Plan, *, limits: bool = True) -> Iterator[Row]:
    """Yield what a plan says, as (section, what, how much); how much larger a step may be only
    with `limits`.
    """
    yield from _memory(
        "device memory", plan.memory.device, plan.step.device_peak, plan.memory.device_limit
    )
    yield from _memory("host memory", plan.memory.host, plan.host_peak, plan.memory.host_limit)
    yield from (
        (f"disk: {MEMORY_PARTS.get(part, part)}", "", human_bytes(size))
        for part, size in plan.memory.disk.items()
        if size
    )
    yield from _step(plan)
    if (experts := plan.experts) is not None:
        yield "experts", f"in each of {experts.layers} layers", f"{experts.count:,}"
        yield "experts", "of each token", f"{experts.active:,}"
        yield "experts", "leased together", f"{experts.together:,}"
        yield "experts", "reached by a step, if routers choose all alike", f"{experts.reached:,.1f}"
        yield from (
            ("weights of all layers", part, human_bytes(size))
            for part, size in experts.parts.items()
            if size
        )
    yield from _long_rows(plan)
    if limits:
        yield from _limits(plan)
    machine = plan.machine
    yield "machine", f"{machine.name}, {'measured' if plan.measured else 'by its profile'}", ""
    yield "machine", "disk", f"{human_bytes(machine.speeds.disk)}/s"
    if not machine.shared:
        yield "machine", "link", f"{human_bytes(machine.speeds.link)}/s"
    yield "machine", "matrix products", human_rate(machine.flops(plan.itemsize), "FLOP/s")
    if (epoch := plan.epoch) is not None:
        yield "an epoch", "rows, tokens", f"{human_count(epoch.rows)}, {human_count(epoch.tokens)}"
        yield "an epoch", "steps", f"{epoch.steps:,}"
        if epoch.hours:
            yield "an epoch", "takes", human_duration(3600 * epoch.hours)
        if epoch.cost is not None:
            yield "an epoch", "costs", f"{epoch.cost:,.2f}"
        if epoch.hours:
            yield (
                "the run",
                f"{epoch.run_steps:,} steps take",
                human_duration(3600 * epoch.run_hours),
            )
    for note in plan.notes:
        yield "note", note, ""


def show_plan(plan: Plan, console: Console, *, verbose: bool = False) -> None:
    """Print whether and how well the run goes, then its sums; `verbose`: every part of them, the
    sums in bold.
    """
    console.print(plan.verdict, style="bold" if plan.fits else "bold red", soft_wrap=True)
    shown = [
        row
        for row in rows(plan, limits=verbose)
        if verbose or row[1] in SUMS or row[0] in ("note", "the run", LONG_ROWS)
    ]
    styled_rows = (
        tuple(Text(cell, "bold") for cell in row) if row[1] == "in all" else row for row in shown
    )
    print_table(styled_rows, console, amounts=True)
    if not verbose:
        console.print("--verbose shows the parts", style="dim")


def show_run(planner: Planner, data: "TokenDataset | PreferenceDataset", console: Console) -> None:
    """Print the plan of a run that is about to begin, with every part of it."""
    show_plan(plan_with(planner, data=data), console, verbose=True)


def _memory(section: str, parts: Mapping[str, int], peak: int, limit: int) -> Iterator[Row]:
    for part, size in parts.items():
        if size:
            yield section, MEMORY_PARTS[part], human_bytes(size)
    yield section, "in all", f"{human_bytes(peak)} of {human_bytes(limit)}"


def _long_rows(plan: Plan) -> Iterator[Row]:
    """Yield what rows take that go through layers in chunks."""
    if (long := plan.long_rows) is None:
        return
    section = LONG_ROWS
    yield section, "tokens of the longest", f"{long.length:,}"
    yield section, "tokens that go through a layer at once", f"{long.chunk:,}"
    yield section, "of all operations attention", f"{long.attention:.0%}"
    for what, size in long.layer.items():
        yield section, what, human_bytes(size)
    yield section, "tokens that would fit", f"{long.longest:,}"
    yield section, long.reason, ""


def _limits(plan: Plan) -> Iterator[Row]:
    if plan.room.crossover is not None:
        yield (
            "limits",
            "tokens per step above which reading costs no time",
            human_count(plan.room.crossover),
        )
    yield "limits", "largest micro_batch_size", str(plan.room.largest_micro_batch)
    yield "limits", "most tokens per step", human_count(plan.room.largest_step)
    yield (
        "limits",
        "1 GB more device memory saves, per step",
        f"{plan.room.gigabyte_on_device:.3g} s",
    )
    yield "limits", "1 GB more host memory saves, per step", f"{plan.room.gigabyte_in_host:.3g} s"
    if plan.room.adapters:
        size = human_bytes(plan.room.adapter_bytes)
        what = f"adapters like this one ({size}) that fit at once (lema serve-learner)"
        most = "or more" if plan.room.adapters == MOST_ADAPTERS else ""
        yield "limits", what, f"{plan.room.adapters:,} {most}".strip()


def _step(plan: Plan) -> Iterator[Row]:
    step = plan.step
    allocation = plan.allocation
    waiting = ("layers' inputs wait", allocation.boundaries)
    if allocation.saved_on != "device":
        waiting = ("activations wait", allocation.saved_on)
    amounts = {
        "tokens of full rows": human_count(plan.tokens),
        "layers that stay on the device": str(len(allocation.residents)),
        "layers kept in host memory": str(len(allocation.host_cached)),
        "layers not recomputed": str(len(allocation.saved)),
        "layers recomputed but for products": str(len(allocation.products)),
        waiting[0]: f"on the {waiting[1]}",
        "read from disk": human_bytes(step.bytes_read),
        "copied to the device": human_bytes(step.bytes_uploaded),
        "takes": f"{step.seconds:.3g} s",
        "limited by": BOTTLENECKS[step.bottleneck],
        "computing": f"{step.compute:.3g} s",
        "on the link": f"{step.link:.3g} s",
        "on the disk": f"{step.disk:.3g} s",
        "waiting for the disk": f"{step.stall_disk:.3g} s",
        "waiting for the link": f"{step.stall_upload:.3g} s",
        "waiting for activations": f"{step.stall_boundaries:.3g} s",
        "tokens per second": human_count(plan.tokens_per_second or 0),
    }
    if not step.seconds:
        amounts = {what: amount for what, amount in amounts.items() if what not in TIMED}
    for what, amount in amounts.items():
        yield "a step", what, amount


def draw(plan: Plan, planner: Planner, path: Path) -> None:
    """Draw step time against tokens per step, with the crossover marked; what `path` ends in
    decides the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib", where="--plot", how=installing("plot")
        ) from error
    points = list(step_curve(planner, plan.allocation, plan.crossover or plan.tokens))
    tokens = [count for count, _ in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log",
        yscale="log",
        xlabel="tokens per optimizer step",
        ylabel="seconds per optimizer step",
    )
    axes.plot(tokens, [step.seconds for _, step in points], linewidth=2.5, label="step, predicted")
    axes.plot(tokens, [step.compute for _, step in points], linestyle="--", label="computing alone")
    moved = [max(step.link, step.disk) for _, step in points]
    axes.plot(tokens, moved, linestyle="--", label="reading and copying alone")
    if (crossover := plan.crossover) is not None:
        axes.axvline(crossover, color="gray", linestyle=":")
        axes.annotate(
            f" hidden from {crossover:,.0f} tokens on", (crossover, axes.get_ylim()[0]), va="bottom"
        )
    if tokens[0] <= plan.tokens <= tokens[-1]:
        axes.plot([plan.tokens], [plan.step.seconds], marker="o", color="black", label="this run")
    axes.set_title(f"{planner.blueprint.directory.name} on {plan.machine.name}")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        what = f"matplotlib cannot draw this: {error}"
        raise ConfigError(what, where=f"--plot {path}", how="end it in .png") from error
    except OSError as error:
        raise DiskError(f"cannot write the picture: {error.strerror}", where=str(path)) from error
