"""The memory that a learner keeps for its adapters, beside the layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lema.config.units import human_bytes, memory_bytes
from lema.errors import MemoryLimitError
from lema.plan.plan import MOST_ADAPTERS, most_adapters
from lema.train.learner.adapter import AdapterSpec, Targets
from lema.train.model import LemaModel

__all__ = ["AdapterBudget"]

AUTO = (None, "auto")  # values of `device_memory` that name no bytes


@dataclass(frozen=True)
class AdapterBudget:
    """Room for so many adapters of a rank at once; more of lower ranks fit as well.

    Args:
        targets: what adapters may adapt.
        count: how many adapters.
        rank: of each.
    """

    targets: Targets
    count: int
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of them all: values, gradients and AdamW's moments in fp32."""
        return self.count * self.targets.nbytes(self.rank)

    def check(self, spec: AdapterSpec, taken: int = 0) -> None:
        """Make sure that an adapter fits beside others that have taken so many bytes.

        Raises:
            MemoryLimitError: it does not.
        """
        needed = self.targets.nbytes(spec.rank)
        if taken + needed > self.nbytes:
            what = (
                f"an adapter of rank {spec.rank} takes {human_bytes(needed)}, and "
                f"{human_bytes(self.nbytes - taken)} of {human_bytes(self.nbytes)} are left"
            )
            how = "remove an adapter, take a lower rank, or plan for more adapters"
            raise MemoryLimitError(what, where="adapters", how=how)

    def reserve(self, opened: LemaModel) -> None:
        """Take the budget off the device memory that is planned with, and plan the rest.

        Raises:
            MemoryLimitError: the adapters, or the layers beside them, do not fit.
        """
        memory = opened.backend.memory()
        asked = opened.config.device_memory
        unlimited = asked in AUTO and memory.shared
        free = memory.total - memory.used
        limit = free if asked in AUTO else memory_bytes(asked, memory.total)
        left = limit - self.nbytes
        kept = f"{self.count} adapters of rank {self.rank} take {human_bytes(self.nbytes)}"
        if left <= 0:
            what = f"{kept} of {human_bytes(limit)}"
            raise MemoryLimitError(what, where="device_memory", how="plan for fewer or lower ranks")
        if not unlimited:
            opened.choose_settings({"device_memory": left})
        try:
            opened.allocation  # noqa: B018 - now, because limits that are too small should be known at once
        except MemoryLimitError as error:
            error.explain(f"{error.how}; {kept} of the limit, so fewer or lower ranks help as well")
            raise

    def summary(self, opened: LemaModel) -> str:
        """Say what an adapter takes, how many are planned for, and how many would fit instead."""
        one_adapter = self.targets.nbytes(self.rank)
        planner = opened.opened
        if opened.config.device_memory not in AUTO:
            limit = memory_bytes(opened.config.device_memory, planner.limits[0]) + self.nbytes
            config = planner.config.model_copy(update={"device_memory": limit})
            planner = replace(planner, config=config)
        planner = replace(planner, workload=planner.work(planner.shape.micro_batch))
        most = most_adapters(planner, planner.demand(), one_adapter)
        would_fit = f"{most:,} or more" if most == MOST_ADAPTERS else f"{most:,}"
        return (
            f"there is memory for {self.count:,} adapters of rank {self.rank} at once, "
            f"{human_bytes(one_adapter)} each; {would_fit} would fit beside the layers"
        )
