"""Which samples a phase draws: how its mixture comes in, and where it goes on with what phases before have read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from lema.data.fade import Fade
from lema.data.interleave import Interleaving
from lema.data.sampling import rates_of
from lema.data.start import Start
from lema.phaseplan.nested import Several
from lema.phaseplan.settings import PhaseSettings, Tokens
from lema.problems import Problem
from lema.settingtypes import Count

if TYPE_CHECKING:
    from lema.phaseplan.phase import Phase
    from lema.phaseplan.plan import PhasePlan

__all__ = ["FadeConfig", "counts_of", "fade_of", "fade_problems", "fade_too_long", "starts_of"]


def _shape(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class FadeConfig(PhaseSettings):
    """Over its first so many steps or tokens, the mixture of a phase comes in for that of the phase before.

    Raises:
        SettingsError: a setting is unknown or out of range, or both lengths are given, or neither is.
    """

    steps: Count | None = None
    """Optimizer steps that it takes."""
    tokens: Tokens | None = None
    """Or tokens, padding included; what is less than a row at the end is left out."""
    shape: Annotated[Literal["linear", "cosine", "sigmoid"], BeforeValidator(_shape)] = "linear"
    """How the weight of the mixture before falls from 1 to 0; `lema.data.fade` has the formulas."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            both = self.steps is not None
            what = "steps and tokens both say how long it is" if both else "steps is not given, nor is tokens"
            raise Several([Problem("steps", what, "keep one" if both else "add one of them")])
        return self

    def samples(self, batch_size: int, block_size: int) -> int:
        """Return over how many samples it goes."""
        return self.tokens // block_size if self.steps is None and self.tokens else (self.steps or 0) * batch_size


def fade_problems(before: Phase | None, phase: Phase, path: str) -> Iterator[Problem]:
    """Yield what is wrong with the fade of a phase, given the phase before."""
    if phase.fade is None:
        return
    if before is None:
        yield Problem(path, f"{path}: there is no phase before this one whose mixture could fade", "leave fade out")
        return
    if rates_of(before.mixture) == rates_of(phase.mixture):
        yield Problem(path, f"{path}: the mixture is that of the phase before, so that nothing fades", "leave fade out")
    styles = {sampling.full_name: sampling.style for sampling in before.mixture}
    for sampling in phase.mixture:
        if (was := styles.get(sampling.full_name, sampling.style)) is not sampling.style:
            what = f"{path}: {sampling.full_name} is {was} in the phase before, and {sampling.style} in this one"
            yield Problem(path, what, "give a data set one style")


def fade_too_long(phase: Phase, steps: int, batch_size: int, block_size: int, path: str) -> Iterator[Problem]:
    """Yield what is wrong with how long a fade is, where its phase has so many steps."""
    if phase.fade is None:
        return
    key = f"{path}.{'tokens' if phase.fade.steps is None else 'steps'}"
    samples, most = phase.fade.samples(batch_size, block_size), steps * batch_size
    if samples > most:
        what = f"{key}: the fade is {samples} rows, and the phase has {most} of them"
        yield Problem(key, what, "make it shorter, or give the phase more tokens")
    if not samples:
        yield Problem(key, f"{key}: the fade is less than one row of {block_size} tokens", "make it longer")


def fade_of(plan: PhasePlan, index: int) -> Fade | None:
    """Return the fade that a phase begins with; None: its mixture holds from its first sample on."""
    fade = plan.phases[index].fade
    if fade is None:
        return None
    samples = fade.samples(plan.batch_size, plan.block_size)
    return Fade(tuple(plan.phases[index - 1].mixture), samples, fade.shape)


def counts_of(plan: PhasePlan, index: int) -> dict[str, int]:
    """Return how many samples of a phase each data set gives, by name."""
    phase = plan.phases[index]
    turns = Interleaving(rates_of(phase.mixture), "turns", plan.seed, index, fade=fade_of(plan, index))
    return turns.counts(plan.steps(index).steps * plan.batch_size)


def starts_of(plan: PhasePlan) -> Sequence[dict[str, Start]]:
    """Return of each phase where it begins with each of its data sets, by name."""
    found: list[dict[str, Start]] = []
    reached: dict[str, Start] = {}
    for index, phase in enumerate(plan.phases):
        counts, anew = counts_of(plan, index), phase.data == "restart"
        begins = {name: Start(index, 0) if anew else reached.get(name, Start(index, 0)) for name in counts}
        reached |= {name: Start(start.stage, start.taken + counts[name]) for name, start in begins.items()}
        found.append(begins)
    return found
