"""What tests take for granted of the versions of libraries: those that `constraints.txt` names,
unless a test says it.

Tables of the documentation are made with one version, and a type of model comes with one. Where
another version is installed, a test that is of the first alone is skipped with a reason that names
both.
"""

from collections.abc import Container
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@cache
def constrained() -> dict[str, str]:
    """Return the versions that tests run with by default, by the name of the distribution."""
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    wanted = map(Requirement, lines)
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in wanted}


def installed(library: str) -> str:
    return version(library).partition("+")[0]


def is_constrained(library: str) -> bool:
    """Whether a library is installed in the version that tests run with by default."""
    return installed(library) == constrained()[library]


def made_with(*libraries: str) -> pytest.MarkDecorator:
    """Return the mark of a test of what was made with the versions that tests run with by
    default.
    """
    others = [name for name in libraries if not is_constrained(name)]
    told = ", ".join(
        f"{name} {constrained()[name]}, and {installed(name)} is installed" for name in others
    )
    return pytest.mark.skipif(bool(others), reason=f"made with {told}")


def recomputation() -> str:
    """Return the option of a trainer that has layers recomputed, by the name that this release
    has for it.
    """
    from transformers import TrainingArguments

    renamed = "activation_checkpointing"
    return (
        renamed
        if renamed in {field.name for field in fields(TrainingArguments)}
        else "gradient_checkpointing"
    )


def skip_unknown(model_type: str, known: Container[str]) -> None:
    """Skip a test of a type of model that another version of `transformers` has. With the version
    that tests run with by default nothing is skipped, so that no test is lost by a name that no
    type has."""
    if model_type not in known and not is_constrained("transformers"):
        pytest.skip(f"transformers {installed('transformers')} has no type {model_type!r}")


def skip_unless_expanded(method: str) -> None:
    """Skip a test that compares with what `transformers` makes of weights that it does not
    expand in this release.
    """
    if method == "compressed-tensors":
        from transformers.integrations import compressed_tensors

        if not hasattr(compressed_tensors, "CompressedTensorsDequantize") and not is_constrained(
            "transformers"
        ):
            pytest.skip(
                f"transformers {installed('transformers')} does not load weights of "
                f"{method} expanded"
            )
