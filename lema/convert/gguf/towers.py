"""Towers of a model, which see images or hear: llama.cpp's converter writes the language model
alone, and a tower goes into a second file (`mmproj`), which is not made here.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

from lema.errors import ConfigError, listed
from lema.lora.class_names import class_of_modalities
from lema.model import meta_model, read_config
from lema.model.skeleton import find_towers, is_in

__all__ = ["check_no_towers", "towers_note"]

WHERE = "--for gguf"


def check_no_towers(towers: Iterable[str], adapted: Iterable[str]) -> None:
    """Refuse an adapter of towers, which a GGUF of the language model has no place for.

    Args:
        towers: names of the modules of towers.
        adapted: names of the modules that the adapter adapts.

    Raises:
        ConfigError: some of these are in towers.
    """
    modules = [*towers]
    if inside := [name for name in adapted if is_in(name, modules)]:
        what = "a GGUF has the language model alone, and the adapter adapts towers"
        how = "`lema merge` writes them into the model; train an adapter without them for GGUF"
        raise ConfigError(f"{what}: {listed(inside, 3)}", where=WHERE, how=how)


def towers_note(directory: Path, *, trust_remote_code: bool) -> tuple[str, ...]:
    """Return what there is to say of the towers of a model that is converted: one sentence, or
    none."""
    config = read_config(directory, trust_remote_code=trust_remote_code)
    kind = class_of_modalities(config, "all")
    if kind is None and not getattr(config, "architectures", None):
        return ()
    model = meta_model(deepcopy(config), kind=kind, trust_remote_code=trust_remote_code)
    if not (towers := find_towers(model)):
        return ()
    names = listed(towers, 3)
    return (
        f"The file has the language model alone. The towers ({names}) see images or hear: "
        "convert_hf_to_gguf.py --mmproj makes a file of them, if llama.cpp knows the type.",
    )
