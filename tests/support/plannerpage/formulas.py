"""What layers and the head of a kind of model cost, as formulas of its sizes.

A model of one layer whose sizes are primes is measured as `lema plan` measures a model, on tensors
without values; `Size` then says which sizes every figure is made of. Nothing is fitted.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import CONFIG_MAPPING

from lema.backend import Parallel
from lema.engine.head.cut import HeadCut
from lema.plan.blueprint import Blueprint
from lema.plan.work.meter import Tally
from lema.plan.work.workload import Workload
from lema.storage.quantized.formats import KINDS, LIBRARIES
from lema_tools.models.published import layout_of, write_headers
from plannerpage.hollowforms import AS_PUBLISHED, FORMS
from plannerpage.modelfacts import CHUNKS, ROWS, drawn_up, measured
from plannerpage.sizes import SAMPLE, Peak, Size, total

__all__ = ["FAMILIES", "absent_keys", "formulas_of", "stored_bytes"]

# Of dense layers whose weights are each a product of sizes: those of phi3 are sums, side by side.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")
OF_LAYERS = (
    *("forward", "recompute", "backward", "saved_bytes", "working_bytes", "forward_bytes"),
    *("gradient_bytes", "product_bytes", "product_flops"),
)


class TracedTally(Tally):
    """Counts as a tally does, with the sizes that each count is made of."""

    def __init__(self, parallel: Parallel | None = None) -> None:
        super().__init__(parallel)
        self.live = Size.of(0)
        self.flops = Size.of(0)
        self.peak: Any = Peak()

    def flops_to_saved(self) -> int:
        """Return the operations up to the last saved tensor."""
        self._steps = [replace(step, flops=Size.of(step.flops)) for step in self._steps]
        return super().flops_to_saved()


def formulas_of(kind: str) -> dict[str, Any]:
    """Return the formulas of a kind of model, of heads that share keys and of those that do not.

    Each formula is a list of terms, `[factor, exponents of the sizes]`; a peak is a list of formulas,
    of which the largest holds.
    """
    return {"shared": _of_heads(kind, SAMPLE["heads"]), "each": _of_heads(kind, 1)}


def absent_keys(kind: str) -> dict[str, Any]:
    """Return what a config.json of a kind means where it has no such key; of numbers of heads and
    of their width None where it follows from the other sizes.
    """
    first, other = (
        CONFIG_MAPPING[kind](hidden_size=hidden, num_attention_heads=heads, pad_token_id=0)
        for hidden, heads in ((1024, 8), (1152, 12))
    )
    absent = {
        name: size if (size := getattr(first, name, None)) == getattr(other, name, None) else None
        for name in ("num_key_value_heads", "head_dim")
    }
    return absent | {
        "tie_word_embeddings": first.tie_word_embeddings,
        "max_position_embeddings": first.max_position_embeddings,
    }


def _of_heads(kind: str, heads: int) -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        drawn, shapes = _sample(kind, heads, Path(scratch))
        with (
            patch("lema.plan.work.workload.Tally", TracedTally),
            patch("lema.plan.work.workload.sum", total, create=True),
            patch("lema.engine.skip_matmuls.sum", total, create=True),
            patch.object(HeadCut, "spans", _spans),
        ):
            works = [_traced(drawn, rows) for rows in ROWS]
    return {
        "weights": [[name, [_formula(size) for size in shape]] for name, shape in shapes],
        "rows": [_of_rows(*work) for work in works],
    }


def _sample(
    kind: str, heads: int, directory: Path
) -> tuple[Blueprint, list[tuple[str, tuple[int, ...]]]]:
    """Draw up a model whose sizes are primes; return it with the weights of its layer."""
    groups = SAMPLE["groups"]
    sizes = dict[str, Any](
        hidden_size=SAMPLE["hidden"],
        intermediate_size=SAMPLE["intermediate"],
        num_hidden_layers=1,
        num_attention_heads=heads * groups,
        num_key_value_heads=groups,
        head_dim=SAMPLE["width"],
        vocab_size=SAMPLE["words"],
        pad_token_id=0,
        layer_types=None,
    )
    config = CONFIG_MAPPING[kind](**sizes)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    layout = layout_of(config, "bf16")
    write_headers(directory / "model.safetensors", layout)
    shapes = [
        (name.partition(".layers.0.")[2], shape)
        for name, (_, shape) in layout.items()
        if ".layers.0." in name
    ]
    return drawn_up(directory, "sft", SAMPLE["rank"]), shapes


def _traced(drawn: Blueprint, rows: int) -> tuple[Workload, Workload]:
    """Return what micro-batches cost in the layer, and with its figures the head in pieces."""
    arguments = drawn, rows, SAMPLE["length"], CHUNKS[0]
    layers = measured(*arguments)
    return layers, measured(*arguments, layers)


def _spans(*_: Any) -> tuple[tuple[int, int], ...]:
    """Return pieces of the head of one size, which is not that of any weight."""
    piece = SAMPLE["piece"]
    return tuple((first, first + piece) for first in range(0, 3 * piece, piece))


def _of_rows(layers: Workload, pieced: Workload) -> dict[str, Any]:
    (work,) = layers.works
    pieces = pieced.pieces
    assert pieces is not None, "the sample's head can be cut"
    return {
        "layer": [_formula(getattr(work, name)) for name in OF_LAYERS],
        "beside": [
            _formula(layers.hidden_bytes),
            _formula(layers.call_bytes),
            _formula(layers.prelude_bytes),
            [[[layers.state_bytes, []]]],
        ],
        "head": [
            _formula(pieced.head.flops),
            _formula(pieced.head.working_bytes),
            _formula(pieces.working_bytes),
            _formula(pieces.waiting_bytes),
        ],
    }


def _formula(figure: Any) -> list[Any]:
    """Return a figure as the page evaluates it: the largest of sums of terms, each a factor and the
    places of the symbols that it is multiplied by."""
    sizes = figure.highest if isinstance(figure, Peak) else [Size.of(figure)]
    return [
        [
            [float(factor), [at for at, times in enumerate(term) for _ in range(times)]]
            for term, factor in size.terms.items()
        ]
        for size in sizes
    ]


def stored_bytes() -> dict[str, list[float]]:
    """Return what a weight takes in each form: bytes of an element, of a row and of the weight."""
    forms = {AS_PUBLISHED: [2.0, 0.0, 0.0]}
    for form in FORMS[1:]:
        library = LIBRARIES[KINDS[form]]
        wide, tall, large = (
            _part_bytes(library.specs(form, shape, torch.bfloat16)[0])
            for shape in ((1 << 12, 1 << 14), (1 << 13, 1 << 13), (1 << 13, 1 << 14))
        )
        element = (large - wide - (tall - wide)) / (1 << 26)
        row = (tall - wide) / (1 << 12)
        forms[form] = [element, row, wide - element * (1 << 26) - row * (1 << 12)]
    return forms


def _part_bytes(parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in parts.values())
