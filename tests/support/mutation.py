"""One way in which a published checkpoint, its `config.json` or the rows that it reads may be
other than usual.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from asloaded import VOCABULARY, rows, tensors
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Mutation", "Tensors", "batches_of", "sharded"]

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Mutation:
    """One change of a tiny model.

    Attributes:
        name: of the case.
        built: settings that the model is built with, in the part of the config that reads text.
        edited: keys of `config.json`, in the part that reads text, changed after the weights were
            written.
        top: the same of the whole, where the config has parts.
        dropped: keys that are taken out of every part of `config.json`.
        stored: makes other stored tensors of those that there are.
        files: rearranges the files of the directory.
        opened: settings that LEMA and `from_pretrained` open the model with.
        lengths: of the micro-batches; one, where what is drawn or added differs with the order of
            micro-batches.
        packs: of the micro-batches, the lengths of the rows in each pack, which take the place of
            `lengths`.
        padded: the side at which a row of each micro-batch is padded.
        whole: loads the model for PEFT, where `from_pretrained` alone leaves it quantised.
        auto: compare the dtype, and the values in it, that the model has where nobody names one.
        generates: compare what is generated.
    """

    name: str
    built: Mapping[str, Any] = field(default_factory=dict)
    edited: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    stored: Callable[[Tensors], Tensors] | None = None
    files: Callable[[Path], None] | None = None
    opened: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (12, 9)
    packs: tuple[tuple[int, ...], ...] = ()
    padded: Literal["left", "right"] | None = None
    whole: Callable[[Path], Any] | None = None
    auto: bool = False
    generates: bool = True


def batches_of(mutation: Mutation) -> list[Tensors]:
    """Return the micro-batches of a mutation, of two rows each: packs of several, or one of the
    two padded.
    """
    if mutation.packs:
        return [_pack(lengths) for lengths in mutation.packs]
    batches: list[Tensors] = rows(*mutation.lengths, count=2)
    return [_padded(batch, mutation.padded) for batch in batches] if mutation.padded else batches


def _pack(lengths: tuple[int, ...]) -> Tensors:
    """Return two packs of rows with these lengths, in both orders. The first token of a row is
    not trained.
    """
    packs = (lengths, lengths[::-1])
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    ids = torch.randint(3, VOCABULARY, (2, total), generator=generator)
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in pack]) for pack in packs]
    )
    return {
        "input_ids": ids,
        "labels": torch.where(positions == 0, -100, ids),
        "position_ids": positions,
    }


def _padded(batch: Tensors, side: str) -> Tensors:
    """Return a micro-batch whose second row has three tokens less."""
    mask = torch.ones_like(batch["input_ids"])
    mask[1, slice(3) if side == "left" else slice(-3, None)] = 0
    empty = mask == 0
    ids = batch["input_ids"].masked_fill(empty, 0)
    labels = batch["labels"].masked_fill(empty, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def sharded(described: Mapping[str, Any] | None) -> Callable[[Path], None]:
    """Store a model in three files with an index, with the `metadata` that it shall have; None:
    it has none.
    """

    def divide(directory: Path) -> None:
        held = tensors(directory)
        names = sorted(held)
        places = dict[str, str]()
        (directory / "model.safetensors").unlink()
        for number in range(3):
            file = f"model-0000{number + 1}-of-00003.safetensors"
            part = {name: held[name] for name in names[number::3]}
            save_file(part, directory / file, metadata={"format": "pt"})
            places |= dict.fromkeys(part, file)
        index = (
            {"weight_map": places}
            if described is None
            else {"metadata": dict(described), "weight_map": places}
        )
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return divide
