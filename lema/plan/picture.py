"""A picture of a plan: seconds of a step over its tokens, and where the weights' way begins to be hidden."""

from __future__ import annotations

from pathlib import Path

from lema.errors import ConfigError, DiskError
from lema.plan.outlook import Plan
from lema.plan.planner import Planner

__all__ = ["draw"]


def draw(plan: Plan, planner: Planner, path: Path) -> None:
    """Draw step time against tokens per step, with the crossover marked.

    Args:
        plan: to draw.
        planner: that made it.
        path: of the picture; what it ends in decides the format.

    Raises:
        ConfigError: matplotlib is not installed, or knows no such format.
        DiskError: the picture could not be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib", where="--plot", how="pip install lema[plot]") from error
    points = list(planner.curve(plan.allocation, plan.room.crossover or plan.tokens))
    tokens = [count for count, _ in points]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="tokens per optimizer step", ylabel="seconds per optimizer step"
    )
    axes.plot(tokens, [step.seconds for _, step in points], linewidth=2.5, label="step, predicted")
    axes.plot(tokens, [step.compute for _, step in points], linestyle="--", label="computing alone")
    moved = [max(step.link, step.disk) for _, step in points]
    axes.plot(tokens, moved, linestyle="--", label="reading and copying alone")
    if plan.room.crossover is not None:
        axes.axvline(plan.room.crossover, color="gray", linestyle=":")
        axes.annotate(
            f" hidden from {plan.room.crossover:,.0f} tokens on", (plan.room.crossover, axes.get_ylim()[0]), va="bottom"
        )
    if tokens[0] <= plan.tokens <= tokens[-1]:
        axes.plot([plan.tokens], [plan.step.seconds], marker="o", color="black", label="this run")
    axes.set_title(f"{planner.blueprint.directory.name} on {plan.machine.name}")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(
            f"matplotlib cannot draw this: {error}", where=f"--plot {path}", how="end it in .png"
        ) from error
    except OSError as error:
        raise DiskError(f"cannot write the picture: {error.strerror}", where=str(path)) from error
