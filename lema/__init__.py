"""Fine-tune language models larger than the device's memory: frozen weights stream through it layer
by layer.

    from lema import LemaConfig, LemaModel

Names are imported when they are first used, so `import lema` costs nothing. `lema.config.printing`
says why these imports print nothing.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lema.config import LemaConfig, MemoryStrategy
    from lema.convert import prepare_monolithic_safetensors
    from lema.data import Sampling
    from lema.errors import LemaError
    from lema.train import LemaModel, LemaTrainer
    from lema.train.hf.asyncmixin import StreamedAsyncMixin
    from lema.train.hf.mixin import StreamingMixin
    from lema.train.hf.peftmodel import streamed
    from lema.train.hf.served import ServedMixin
    from lema.train.phases.loratrainer import LoRATrainer, LoRATrainState, transition_to_lora
    from lema.train.phases.phase import Phase
    from lema.train.phases.plan import PhasePlan
    from lema.train.phases.twophase import LoRAConfig, LoRATrainerConfig

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
    "ServedMixin",
    "StreamedAsyncMixin",
    "StreamingMixin",
    "__version__",
    "prepare_monolithic_safetensors",
    "streamed",
    "transition_to_lora",
]


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are imported when they are
    first used (PEP 562).

    So the import of one module does not import the others of its folder, which may import
    transformers or PEFT.

    Args:
        package: its full name.
        homes: every exported name, and the module of the package that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(_quiet_import(f"{package}.{homes[name]}"), name)

    return get, lambda: sorted(homes)


def _quiet_import(module: str) -> ModuleType:
    """Import a module of LEMA without the warnings of libraries that PEFT and transformers
    import on their own.
    """
    if module in sys.modules:
        return import_module(module)  # which waits where another thread is importing it
    # not at the top, because `lema.config` is a user of `lazy_exports`
    from lema.config.printing import hushed

    with hushed():
        return import_module(module)


_public, _ = lazy_exports(
    __name__,
    {
        "LemaConfig": "config",
        "LemaError": "errors",
        "LemaModel": "train.model",
        "LemaTrainer": "train.trainer",
        "LoRAConfig": "train.phases.twophase",
        "LoRATrainState": "train.phases.loratrainer",
        "LoRATrainer": "train.phases.loratrainer",
        "LoRATrainerConfig": "train.phases.twophase",
        "MemoryStrategy": "config",
        "Phase": "train.phases.phase",
        "PhasePlan": "train.phases.plan",
        "Sampling": "data.mixing.sampling",
        "ServedMixin": "train.hf.served",
        "StreamedAsyncMixin": "train.hf.asyncmixin",
        "StreamingMixin": "train.hf.mixin",
        "prepare_monolithic_safetensors": "convert.prepare",
        "streamed": "train.hf.peftmodel",
        "transition_to_lora": "train.phases.loratrainer",
    },
)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name != "__version__":
        return _public(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lema-lora")
    except PackageNotFoundError:
        return "0+not.installed"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _warn_of_same_name() -> None:
    """Warn of another project's package in this folder: each installation overwrites files of
    the other.
    """
    beside = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - pathlib takes longer than all the rest
    names = map(str.lower, os.listdir(beside))  # noqa: PTH208 - as above
    if any(
        name.startswith("lema-") and name.endswith((".dist-info", ".egg-info")) for name in names
    ):
        what = (
            f"another project's package `lema` is installed in {beside}, too, and files of "
            "both have the same names"
        )
        how = "pip uninstall lema, then pip install --force-reinstall --no-deps lema-lora"
        warnings.warn(f"{what}: {how}", stacklevel=3)


_warn_of_same_name()
