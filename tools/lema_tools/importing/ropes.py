"""Rotary parameters of other trainers' runs, as LEMA's `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

from lema_tools.importing.ledger import Ledger

__all__ = ["NAMES", "carry_rope", "rope_of_length"]

NAMES = ("rope_parameters", "rope_scaling")
"""The names that a model's config has had for them."""

BY_LENGTH = ("linear", "yarn", "llama3")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def carry_rope(ledger: Ledger, overrides: Mapping[str, Any]) -> set[str]:
    """Carry what replaces the rotary parameters of the model's config.

    Args:
        ledger: of the run.
        overrides: values of the config that the run replaces.

    Returns:
        The names of those that are carried.
    """
    carried = {name for name in NAMES if overrides.get(name)}
    for name in carried:
        ledger.put(rope_parameters=dict(overrides[name]))
    return carried


def rope_of_length(kind: str, length: int, positions: int) -> dict[str, Any] | None:
    """Return the rotary parameters that LLaMA-Factory makes of their type and of the rows' length;
    None: of this type LEMA has none that compute the same.

    Args:
        kind: the type.
        length: of the longest row.
        positions: that the model was made for.
    """
    if kind not in BY_LENGTH:
        return None
    parameters: dict[str, Any] = {
        "rope_type": kind,
        "factor": float(math.ceil(length / positions)),
    }
    if kind != "linear":
        parameters["original_max_position_embeddings"] = positions
    return parameters | (LLAMA3 if kind == "llama3" else {})
