"""What one phase leaves behind and the next one needs: names, adapters, moments of the optimizer, a model."""

from collections.abc import Iterator, Sequence

from lema.phaseplan.adapters import LoRAConfig
from lema.phaseplan.phase import Phase
from lema.phaseplan.samples import fade_problems
from lema.phaseplan.selection import may_overlap
from lema.problems import Problem

__all__ = ["between_phases", "what_is_carried"]


def between_phases(phases: Sequence[Phase]) -> Iterator[Problem]:
    """Yield what does not fit between phases, in order."""
    before: Phase | None = None
    attached: LoRAConfig | None = None  # adapters that are not merged yet
    names: set[str | None] = set()
    for place, phase in enumerate(phases):
        path = f"phases[{place}]"
        if phase.name in names:
            yield Problem(
                f"{path}.name", f"{path}.name: {phase.name} is the name of an earlier phase", "choose another"
            )
        names.add(phase.name)
        yield from _merging(phase, attached, f"{path}.merge")
        if phase.merge:
            attached = None
        if attached is not None and phase.adapters not in (None, attached):
            what = f"{path}.lora: the phase goes on with adapters of rank {attached.rank}, and describes others"
            yield Problem(f"{path}.lora", what, "make it like theirs, or set merge: true for new adapters")
        if phase.optimizer == "carry" and (why := _nothing_carried(before, phase)):
            what = f"{path}.optimizer: carry, and {why}"
            yield Problem(f"{path}.optimizer", what, "set optimizer: reset")
        yield from fade_problems(before, phase, f"{path}.fade")
        if phase.save is not None and place + 1 < len(phases):
            what = f"{path}.save: only the last phase is saved so; those before leave what the next one begins with"
            yield Problem(f"{path}.save", what, "leave it out, or set it in the last phase")
        before, attached = phase, attached or phase.adapters


def _merging(phase: Phase, attached: LoRAConfig | None, key: str) -> Iterator[Problem]:
    if phase.merge and attached is None:
        yield Problem(key, f"{key}: there are no adapters to merge before this phase", "leave merge out")
    elif attached is not None and not phase.merge and phase.trains != "lora":
        what = f"{key}: the weights would train below adapters that were made for them as they were"
        yield Problem(key, what, "set merge: true")


def _nothing_carried(before: Phase | None, phase: Phase) -> str:
    """Why no moment can be carried into a phase; empty where some can, as far as the plan alone can tell."""
    if before is None:
        return "there is no phase before this one"
    if phase.trains == "lora" and phase.merge:
        return "the adapters of this phase are new"
    if "lora" in (before.trains, phase.trains) and before.trains != phase.trains:
        return f"the phase before trains {before.trains}, so that nothing of this one has moments"
    if phase.trains != "lora" and not _both_train_some(before, phase):
        return f"the phase before trains {_selected(before)}, so that nothing of this one has moments"
    return ""


def _both_train_some(before: Phase, phase: Phase) -> bool:
    """Whether two phases of weights may train one of them both."""
    if "full" in (before.trains, phase.trains):
        return True
    return may_overlap((before.layers, before.trainable), (phase.layers, phase.trainable))


def what_is_carried(before: Phase | None, phase: Phase) -> str:
    """Return in words which moments of the optimizer a phase begins with, for a report."""
    if phase.optimizer == "reset" or before is None:
        return "none: the optimizer begins anew"
    if phase.trains == "lora":
        return "those of the adapters"
    if (before.trains, before.layers, before.trainable) == (phase.trains, phase.layers, phase.trainable):
        return f"those of {_selected(phase)}"
    return f"those of what both phases train: of {_selected(phase)}, as far as {_selected(before)} trained before"


def _selected(phase: Phase) -> str:
    if phase.trains == "full":
        return "every weight"
    within = "the layers" if phase.layers is None else ", ".join(str(item) for item in phase.layers)
    return within if phase.trainable is None else f"{', '.join(phase.trainable)} of {within}"
