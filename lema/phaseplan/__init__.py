"""What trains when, on what, for how long and how fast: the phases of a run, as data."""

from lema.phaseplan.adapters import LoRAConfig
from lema.phaseplan.outlook import PlanWarning
from lema.phaseplan.phase import Phase
from lema.phaseplan.plan import Boundary, PhasePlan, Place
from lema.phaseplan.selection import Selection, layer_selection
from lema.phaseplan.twophase import LoRATrainerConfig

__all__ = [
    "Boundary",
    "LoRAConfig",
    "LoRATrainerConfig",
    "Phase",
    "PhasePlan",
    "Place",
    "PlanWarning",
    "Selection",
    "layer_selection",
]
