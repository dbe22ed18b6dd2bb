"""transformers and PEFT as a command imports them: those parts that it needs, and not the
libraries that quantise.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lema.config import LemaConfig

__all__ = ["import_libraries"]

QUANTISING = ("bitsandbytes", "torchao")


def import_libraries(
    context: typer.Context,
    config: "LemaConfig | None" = None,
    *,
    trusted: bool,
    models: bool = True,
) -> None:
    """Import transformers and PEFT without the libraries that quantise, which bring torch's
    compiler and so double the time, unless the run may need them to find one. Whoever imports one
    afterwards gets it, as a quantised model does. Only in a process that `main` began, because what
    they find installed they remember: a user's own is not LEMA's.

    Args:
        context: of the command.
        config: the settings, if the command has any.
        trusted: whether code that comes with a model may run, which may ask for any library.
        models: whether the command builds one. Without, neither PEFT nor the models of transformers
            are imported.
    """
    if context.obj != "main" or trusted or (config is not None and config.optim != "adamw_torch"):
        return
    with _hidden(QUANTISING):
        _import_transformers()
        # which configs of most types import, and torch and sympy with it
        import_module("transformers.activations")

        if models:
            from peft import import_utils

            # by PEFT when it attaches an adapter
            for asked in (
                "is_bnb_4bit_available",
                "is_torchao_available",
            ):
                getattr(import_utils, asked, bool)()


@contextmanager
def _hidden(libraries: tuple[str, ...]) -> Iterator[None]:
    """Let nobody find libraries that are not imported yet, for the length of a `with` block of
    imports.
    """
    hidden = [name for name in libraries if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None: Python's own word for "not there"
    # because looking for garbage in what is only ever imported takes a tenth of the time
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()  # else the next look would be at all of it
        gc.enable()


def _import_transformers() -> None:
    """Import transformers and the list of its models, for which it looks into 2,500 files: once for
    its own names, and again for those of `transformers.models`, which are the same without that
    prefix."""
    import transformers
    from transformers.utils import import_utils

    define_structure = vars(import_utils)["define_import_structure"]
    prefix = "models."
    # which it has kept
    structure = define_structure(
        Path(transformers.__file__).parent / "models", prefix="models"
    ).items()
    models = {
        key: {
            name[len(prefix) :]: exports
            for name, exports in modules.items()
            if name.startswith(prefix)
        }
        for key, modules in structure
    }
    vars(import_utils)["define_import_structure"] = lambda _: models
    try:
        import transformers.models
    finally:
        vars(import_utils)["define_import_structure"] = define_structure
