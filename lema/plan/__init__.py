"""The plan of a run, told before it starts: what memory is spent on, and how long a step takes; no
weights are read. The chapter on memory of docs/internals/reading.md describes the folder."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.plan.cost import Allocation
    from lema.plan.machine import Machine
    from lema.plan.plan import Plan, make_plan

__all__ = ["Allocation", "Machine", "Plan", "make_plan"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"Allocation": "cost", "Machine": "machine", "Plan": "plan", "make_plan": "plan"}
)
