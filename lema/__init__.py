"""Fine-tune language models larger than the device's memory: frozen weights stream through it layer by layer.

    from lema import LemaConfig, LemaModel

Names are imported when first used, so `import lema` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lema.config import LemaConfig, MemoryStrategy
    from lema.data.sampling import Sampling
    from lema.errors import LemaError
    from lema.loratrainer import LoRATrainer, LoRATrainState
    from lema.model import LemaModel
    from lema.phaseplan import LoRAConfig, LoRATrainerConfig, Phase, PhasePlan
    from lema.prepare import prepare_monolithic_safetensors
    from lema.trainer import LemaTrainer

    __version__: str

__all__ = [
    "LemaConfig",
    "LemaError",
    "LemaModel",
    "LemaTrainer",
    "LoRAConfig",
    "LoRATrainState",
    "LoRATrainer",
    "LoRATrainerConfig",
    "MemoryStrategy",
    "Phase",
    "PhasePlan",
    "Sampling",
    "__version__",
    "prepare_monolithic_safetensors",
]

_HOMES = {
    "LemaConfig": "lema.config",
    "LemaError": "lema.errors",
    "LemaModel": "lema.model",
    "LemaTrainer": "lema.trainer",
    "LoRAConfig": "lema.phaseplan",
    "LoRATrainState": "lema.loratrainer",
    "LoRATrainer": "lema.loratrainer",
    "LoRATrainerConfig": "lema.phaseplan",
    "MemoryStrategy": "lema.config",
    "Phase": "lema.phaseplan",
    "PhasePlan": "lema.phaseplan",
    "Sampling": "lema.data.sampling",
    "prepare_monolithic_safetensors": "lema.prepare",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'lema' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lema")
    except PackageNotFoundError:
        return "0+not.installed"
