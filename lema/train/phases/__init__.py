"""Phases: which weights train when, on what data and for how long, and the run that goes through them.

The last part of docs/internals/full-training.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.train.phases.loratrainer import LoRATrainer, LoRATrainState, transition_to_lora
    from lema.train.phases.phase import Phase
    from lema.train.phases.plan import PhasePlan
    from lema.train.phases.run import run_phases
    from lema.train.phases.twophase import LoRAConfig, LoRATrainerConfig

__all__ = [
    "LoRAConfig",
    "LoRATrainState",
    "LoRATrainer",
    "LoRATrainerConfig",
    "Phase",
    "PhasePlan",
    "run_phases",
    "transition_to_lora",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LoRAConfig": "twophase",
        "LoRATrainState": "loratrainer",
        "LoRATrainer": "loratrainer",
        "LoRATrainerConfig": "twophase",
        "Phase": "phase",
        "PhasePlan": "plan",
        "run_phases": "run",
        "transition_to_lora": "loratrainer",
    },
)
