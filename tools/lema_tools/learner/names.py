"""The names that clients and the server give to things, and the paths that they make of them.

A client names nothing but by these, so no path of the file system is made of anything else.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal, TypeAlias

from lema.errors import DataError

__all__ = [
    "CheckpointKind",
    "CheckpointName",
    "ModelName",
    "future_of",
    "model_of_future",
    "new_session",
]

SESSION = re.compile(r"[0-9a-f]{16}")
MODEL = re.compile(r"([0-9a-f]{16}):train:(0|[1-9][0-9]{0,5})")
FUTURE = re.compile(r"([0-9a-f]{16}:train:(?:0|[1-9][0-9]{0,5})):(0|[1-9][0-9]{0,9})")
OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEME = "tinker://"
CheckpointKind: TypeAlias = Literal["weights", "sampler_weights"]
"""What a checkpoint is for: training it further, or sampling."""


def new_session() -> str:
    """Return the name of a new session."""
    return token_hex(8)


@dataclass(frozen=True)
class ModelName:
    """The name of an adapter, as clients have it: of a session, by its number.

    Args:
        session: the session.
        number: which adapter of it.
    """

    session: str
    number: int

    @classmethod
    def read(cls, text: str) -> "ModelName":
        """Return what a client names. `DataError`: it is no name."""
        if (match := MODEL.fullmatch(text)) is None:
            raise DataError(f"{text!r:.80} names no model of this server", where="model_id")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def folder(self) -> str:
        """The name of its directory, and of its adapter in the learner."""
        return f"m{self.session}_{self.number}"

    @classmethod
    def of_folder(cls, name: str) -> "ModelName":
        """Return the name whose directory is called so."""
        session, _, number = name.removeprefix("m").partition("_")
        return cls(session, int(number))


@dataclass(frozen=True)
class CheckpointName:
    """The name of a checkpoint, as clients have it: `tinker://MODEL/weights/NAME`.

    Args:
        model: whose it is.
        kind: what it is for.
        name: the client's own name of it.
    """

    model: ModelName
    kind: CheckpointKind
    name: str

    @classmethod
    def read(cls, text: str) -> "CheckpointName":
        """Return what a client names. `DataError`: it is no path of a checkpoint."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise DataError(
                f"{text!r:.120} is no path of a checkpoint",
                where="path",
                how=f"it looks like {SCHEME}MODEL/weights/NAME",
            )
        return cls.of(ModelName.read(parts[0]), parts[1], parts[2])

    @classmethod
    def of(cls, model: ModelName, kind: str, name: str) -> "CheckpointName":
        """Return the name of parts that come from a client. `DataError`: they make none."""
        if kind not in ("weights", "sampler_weights"):
            raise DataError(f"there are no checkpoints of the kind {kind!r:.80}", where="path")
        if OWN_NAME.fullmatch(name) is None or ".." in name:
            raise DataError(
                f"{name!r:.80} cannot be the name of a checkpoint",
                where="path",
                how="take letters, digits, and . _ - after the first, 128 at most",
            )
        return cls(model, "weights" if kind == "weights" else "sampler_weights", name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """What the model's own list calls it."""
        return f"{self.kind}/{self.name}"

    def place(self, directory: Path) -> Path:
        """Return its directory, below that of all checkpoints."""
        return directory / self.model.folder / self.kind / self.name


def future_of(model: ModelName, seq_id: int) -> str:
    """Return the name of the answer to a request of an adapter."""
    return f"{model}:{seq_id}"


def model_of_future(text: str) -> tuple[ModelName, int] | None:
    """Return whose answer a name is of, and to which request; None: it is no such name."""
    if (match := FUTURE.fullmatch(text)) is None:
        return None
    return ModelName.read(match[1]), int(match[2])
