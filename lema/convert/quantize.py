"""Quantises the weights of layers on their way into a prepared file, and measures what that
costs in precision.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Self

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.convert.tensors import METADATA, bytes_of, stored_name
from lema.errors import ConfigError, ModelError
from lema.model.quantizable import linear_weights
from lema.model.skeleton import find_layers
from lema.storage import TensorFile
from lema.storage.quantized.formats import KINDS, LIBRARIES, expand
from lema.storage.quantized.records import PartSpecs, pieces
from lema.storage.tensorfile import TensorSpec

__all__ = ["Precision", "Quantizer", "check_kind", "show"]

SAMPLED_LAYERS = 8
INPUTS = 16  # random ones, per measured weight


@dataclass(frozen=True)
class Precision:
    """The errors from quantising one kind of module, over the sampled layers, relative to the
    exact values.
    """

    module: str  # the kind, as modules of that kind are called within a layer
    sampled: int  # how many weights were measured
    # the largest relative error of a weight: of its difference from the original, in the 2-norm
    weights_worst: float
    weights_median: float  # the median of the same
    outputs_worst: float  # the largest relative error of what a weight makes of random inputs
    outputs_median: float  # the median of the same


@dataclass(frozen=True)
class _Chosen:
    specs: PartSpecs
    about: Mapping[str, Any]
    kind: str
    sampled: bool


@dataclass
class Quantizer:
    """Which weights of a model are quantised to what; writes them one at a time."""

    kind: str  # "int8", "fp8" or "nf4"
    dtype: torch.dtype  # what the weights expand to
    chosen: dict[str, _Chosen]  # what is quantised, by the names of the files that are written
    unchanged: list[str]  # the linear modules that are not
    refused: list[str]  # the parameters whose shape the format does not take
    # the parameters that are written as several tensors, because no class reads one
    in_pieces: list[str]
    _errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        model: PreTrainedModel,
        dtypes: Mapping[str, torch.dtype],
        file_names: Mapping[str, str],
        *,
        measured: bool = True,
    ) -> Self:
        """Choose the weights of linear modules and experts in decoder layers, but for those kept in
        a wider dtype, and those that are written in pieces. Parameters may be on `meta`; `dtypes`
        say what each tensor of the state dict is written as, `file_names` under which name. If
        `measured`, some weights are compared with what they are quantised to.
        `ConfigError`: the library that quantises to `kind` is not installed; `ModelError`: there is
        nothing to quantise."""
        count = len(find_layers(model)[1])
        sampled = {
            round(i * (count - 1) / max(SAMPLED_LAYERS - 1, 1))
            for i in range(SAMPLED_LAYERS if measured else 0)
        }
        library = LIBRARIES[KINDS[kind]]
        chosen: dict[str, _Chosen] = {}
        refused: list[str] = []
        in_pieces: list[str] = []
        # The library is asked once for each shape, because it takes long over a weight.
        specs_of = cache(library.specs)
        for weight in linear_weights(model, dtypes):
            shape = weight.parameter.shape
            if weight.name not in file_names:
                in_pieces.append(weight.name)
            elif not library.takes(shape):
                refused.append(weight.name)
            else:
                specs, about = specs_of(kind, shape, dtypes[weight.name])
                label = re.sub(r"(?<![^.])\d+(?![^.])", "*", weight.inner.removesuffix(".weight"))
                is_sampled = weight.layer in sampled
                chosen[file_names[weight.name]] = _Chosen(specs, about, label, is_sampled)
        if not chosen:
            why = (
                f"none of their shapes fits {kind}"
                if refused
                else "no decoder layer has a linear module"
            )
            what = f"there is nothing to quantise: {why}"
            how = "quantise to another kind" if refused else "prepare it without --quantize"
            raise ModelError(what, where=f"model_type {model.config.model_type!r}", how=how)
        linears = [
            name for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)
        ]
        unchanged = [name for name in linears if file_names.get(f"{name}.weight") not in chosen]
        expands_to = next(
            dtypes[name] for name, file_name in file_names.items() if file_name in chosen
        )
        return cls(kind, expands_to, chosen, unchanged, refused, in_pieces)

    def specs(self, spec: TensorSpec) -> list[TensorSpec]:
        """Return what is written instead of a tensor: its parts, where it is quantised."""
        name, _, _ = spec
        if name not in self.chosen:
            return [spec]
        library = LIBRARIES[KINDS[self.kind]]
        parts = self.chosen[name].specs.items()
        return [
            (library.part_name(name, part), stored_name(name, dtype), shape)
            for part, (dtype, shape) in parts
        ]

    def metadata(self, names: Sequence[str]) -> dict[str, str]:
        """Return the entries for the header of a file with the tensors `names`."""
        abouts = {name: self.chosen[name].about if name in self.chosen else None for name in names}
        written: dict[str, str] = LIBRARIES[KINDS[self.kind]].metadata(abouts)
        return METADATA | written

    def settings(self, rename: Callable[[str], str]) -> dict[str, Any]:
        """Return the `quantization_config` by which `transformers` loads what is written, in this
        class and in the one that trains, where `rename` gives the names of modules."""
        unchanged = dict.fromkeys([*self.unchanged, *map(rename, self.unchanged)])
        return dict(LIBRARIES[KINDS[self.kind]].settings(self.kind, self.dtype, [*unchanged]))

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts that a weight, or some rows of one, is quantised to."""
        return LIBRARIES[KINDS[self.kind]].quantize(self.kind, weight)[0]

    @torch.no_grad()
    def write(self, out: TensorFile, name: str, weight: Tensor) -> None:
        """Quantise a weight, which has the dtype it is to expand to, and write its parts, or
        raise `DiskError`.
        """
        library = LIBRARIES[KINDS[self.kind]]
        parts, about = library.quantize(self.kind, weight)
        if self.chosen[name].sampled:
            self._measure(self.chosen[name].kind, weight, parts, about)
        for part, tensor in parts.items():
            out.write(library.part_name(name, part), [bytes_of(tensor)])

    @property
    def precision(self) -> tuple[Precision, ...]:
        """What quantising has cost, by kind of module."""
        precisions = []
        for module, errors in self._errors.items():
            weights, outputs = zip(*errors, strict=True)
            precisions.append(
                Precision(
                    module,
                    len(errors),
                    max(weights),
                    median(weights),
                    max(outputs),
                    median(outputs),
                )
            )
        return tuple(precisions)

    def _measure(
        self, kind: str, weight: Tensor, parts: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        expanded = torch.empty_like(weight)
        expand(KINDS[self.kind], parts, about, expanded)
        inputs = torch.randn(weight.shape[-1], INPUTS, generator=torch.Generator().manual_seed(0))
        sums = torch.zeros(4, dtype=torch.float64)
        flat = weight.flatten(0, -2)
        expanded = expanded.flatten(0, -2)
        for rows in pieces(flat):
            exact = flat[rows].float()
            off = expanded[rows].float() - exact
            sums += torch.stack(
                [part.norm().double() ** 2 for part in (off, exact, off @ inputs, exact @ inputs)]
            )
        off_weight, whole_weight, off_output, whole_output = sums.sqrt().tolist()
        errors = (off_weight / (whole_weight or 1.0), off_output / (whole_output or 1.0))
        self._errors.setdefault(kind, []).append(errors)


def check_kind(kind: str | None) -> None:
    """Make sure that `kind` can be quantised to; another is a `ConfigError`."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(
            f"weights cannot be quantised to {kind!r}",
            where="quantize",
            how=f"give {', '.join(KINDS)}",
        )


def show(precision: Sequence[Precision], console: Console) -> None:
    """Print a table of what quantising has cost."""
    table = Table(title="What quantising changed, as a fraction of what was there")
    table.add_column("module", no_wrap=True)
    for heading in (
        "layers sampled",
        "weights: worst",
        "weights: median",
        "outputs: worst",
        "outputs: median",
    ):
        table.add_column(heading, justify="right")
    for row in precision:
        errors = (row.weights_worst, row.weights_median, row.outputs_worst, row.outputs_median)
        table.add_row(row.module, str(row.sampled), *(f"{error:.2%}" for error in errors))
    console.print(table)
