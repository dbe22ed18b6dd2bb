"""What a server keeps on disk, so that nothing that it has acknowledged is lost by a kill.

    DIRECTORY/token                       the secrets of clients
    DIRECTORY/sessions/SESSION.json       whose a session is
    DIRECTORY/models/MODEL/model.json     what an adapter is, written before its making is answered
                        requests/SEQ      a request that was accepted, written before it is answered
                        results/SEQ       its answer, written before it is given
                        state/            values and optimizer after the last step
    DIRECTORY/checkpoints/MODEL/weights/NAME, sampler_weights/NAME

A step's state is written before the step is answered. Requests since then stay, so an adapter that
is read again takes them once more, and comes to the same bits. Every file and directory appears
whole, under a name that only the server makes (`lema_tools.learner.names`).
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lema.errors import AdapterError
from lema.storage.atomic import commit, discard, replace_file, sweep
from lema.storage.diskspace import disk_errors
from lema.storage.regular import read_regular
from lema.train.learner.adapter import AdapterSpec
from lema_tools.learner.names import CheckpointName, ModelName

__all__ = ["CheckpointFile", "Kind", "ModelFile", "Request", "Result", "Session", "State", "Store"]

Kind: TypeAlias = Literal["rows", "optim_step", "save", "save_for_sampler", "load"]
"""What a request of an adapter asks for."""
KINDS: Mapping[str, Kind] = {
    "rows": "rows",
    "optim_step": "optim_step",
    "save": "save",
    "save_for_sampler": "save_for_sampler",
    "load": "load",
}
WEIGHTS = "state.safetensors"
STATE = "state.json"
CHECKPOINT = "checkpoint.json"
LARGEST = 1 << 30  # bytes of a request or an answer
KEPT_RESULTS = 256  # answers of an adapter that stay after later steps


@dataclass(frozen=True)
class Session:
    """A session of a client."""

    name: str
    owner: str
    created: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    finished: bool = False


@dataclass(frozen=True)
class ModelFile:
    """What an adapter is."""

    model: str
    owner: str
    created: float
    spec: AdapterSpec
    metadata: Mapping[str, str] = field(default_factory=dict)
    # the checkpoint that it began with, and whether with the optimizer's state
    begun: str | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class Request:
    """A request that was accepted. `body`: of rows as it came, of others JSON."""

    seq_id: int
    kind: Kind
    body: bytes


@dataclass(frozen=True)
class Result:
    """The answer to a request.

    Args:
        kind: "json", "proto", or "error".
        body: the answer.
        digest: of the request.
    """

    kind: Literal["json", "proto", "error"]
    body: bytes
    digest: str

    @classmethod
    def of_json(cls, value: Mapping[str, Any], digest: str = "") -> "Result":
        """Return an answer of JSON."""
        return cls("json", json.dumps(value).encode(), digest)

    @classmethod
    def of_error(cls, error: str, category: str, digest: str = "") -> "Result":
        """Return a failure, which is the client's (`user`) or the server's (`server`)."""
        body = json.dumps({"error": error, "category": category}).encode()
        return cls("error", body, digest)


@dataclass(frozen=True)
class State:
    """Where an adapter is: the last request that its values have in them, and its steps."""

    seq_id: int = 0
    steps: int = 0


@dataclass(frozen=True)
class CheckpointFile:
    """What a checkpoint is."""

    path: str
    owner: str
    created: float
    spec: AdapterSpec
    steps: int
    request: str
    nbytes: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


class Store:
    """The directory of a server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sessions = directory / "sessions"
        self._models = directory / "models"
        self.checkpoints = directory / "checkpoints"
        with disk_errors(directory):
            for folder in (self._sessions, self._models, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self._sessions, *self._folders()):
            sweep(folder)

    def _folders(self) -> Iterator[Path]:
        for model in self._models.iterdir():
            yield model
            yield model / "requests"
            yield model / "results"

    def write_session(self, session: Session) -> None:
        """Write what a session is."""
        self._write_json(self._sessions / f"{session.name}.json", asdict(session))

    def sessions(self) -> dict[str, Session]:
        """Return the sessions by name."""
        files = sorted(self._sessions.glob("*.json"))
        return {file.stem: Session(**self._read_json(file)) for file in files}

    def make_model_folder(self, model: ModelName) -> None:
        """Make the directories of an adapter, where they are not there."""
        folder = self._models / model.folder
        with disk_errors(folder):
            for name in ("requests", "results"):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def write_model(self, model: ModelName, what: ModelFile) -> None:
        """Write what an adapter is; its directories are there afterwards."""
        self.make_model_folder(model)
        folder = self._models / model.folder
        self._write_json(folder / "model.json", asdict(what))

    def models(self) -> dict[ModelName, ModelFile]:
        """Return the adapters by name."""
        found = {}
        for file in sorted(self._models.glob("*/model.json")):
            values = self._read_json(file)
            spec = AdapterSpec(**values.pop("spec"))
            found[ModelName.of_folder(file.parent.name)] = ModelFile(spec=spec, **values)
        return found

    def append(self, model: ModelName, request: Request) -> None:
        """Write a request that is accepted. `DiskError`: it could not be written."""
        content = request.kind.encode() + b"\n" + request.body
        replace_file(self._models / model.folder / "requests" / str(request.seq_id), content)

    def requests(self, model: ModelName) -> list[Request]:
        """Return the requests of an adapter that its state does not have in it, in order."""
        folder = self._models / model.folder / "requests"
        requests = []
        for file in sorted(_numbered(folder), key=lambda file: int(file.name)):
            kind, _, body = read_regular(file, LARGEST).partition(b"\n")
            requests.append(Request(int(file.name), KINDS[kind.decode()], body))
        return requests

    def forget_request(self, model: ModelName, seq_id: int) -> None:
        """Drop a request, so that it is not taken again."""
        (self._models / model.folder / "requests" / str(seq_id)).unlink(missing_ok=True)

    def write_result(self, model: ModelName, seq_id: int, result: Result) -> None:
        """Write the answer to a request. `DiskError`: it could not be written."""
        content = f"{result.kind} {result.digest}\n".encode() + result.body
        replace_file(self._models / model.folder / "results" / str(seq_id), content)

    def forget_result(self, model: ModelName, seq_id: int) -> None:
        """Drop an answer that was never given."""
        (self._models / model.folder / "results" / str(seq_id)).unlink(missing_ok=True)

    def result(self, model: ModelName, seq_id: int) -> Result | None:
        """Return the answer to a request; None: there is none, or no more."""
        file = self._models / model.folder / "results" / str(seq_id)
        try:
            head, _, body = read_regular(file, LARGEST).partition(b"\n")
        except FileNotFoundError:
            return None
        kind, _, digest = head.decode().partition(" ")
        kinds: dict[str, Literal["json", "proto", "error"]] = {"json": "json", "proto": "proto"}
        return Result(kinds.get(kind, "error"), body, digest)

    def answered(self, model: ModelName) -> set[int]:
        """Return the numbers of requests that have an answer."""
        return {int(file.name) for file in _numbered(self._models / model.folder / "results")}

    def write_state(self, model: ModelName, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write where an adapter is, and drop the requests that it has in it.

        Raises:
            DiskError: it could not be written; what was there before is.
        """
        folder = self._models / model.folder
        with disk_errors(folder):
            commit(folder / "state", lambda part: _fill(part, STATE, asdict(state), tensors))
        for file in _numbered(folder / "requests"):
            if int(file.name) <= state.seq_id:
                file.unlink(missing_ok=True)
        for file in _numbered(folder / "results"):
            if int(file.name) <= state.seq_id - KEPT_RESULTS:
                file.unlink(missing_ok=True)

    def state(self, model: ModelName) -> State:
        """Return where an adapter is."""
        file = self._models / model.folder / "state" / STATE
        return State(**self._read_json(file)) if file.is_file() else State()

    def state_tensors(self, model: ModelName) -> dict[str, Tensor]:
        """Return the values of an adapter after its last step, and its optimizer's state; empty:
        it has taken none.
        """
        file = self._models / model.folder / "state" / WEIGHTS
        return _tensors(file) if file.is_file() else {}

    def save(
        self, name: CheckpointName, what: CheckpointFile, fill: Callable[[Path], object]
    ) -> CheckpointFile:
        """Have a checkpoint appear, whole; `fill` writes its tensors into a directory.

        Returns:
            What it is, with its size.

        Raises:
            DiskError: it could not be written; what was there before is.
        """
        place = name.place(self.checkpoints)
        made = [what]

        def write(part: Path) -> None:
            fill(part)
            nbytes = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
            made.append(CheckpointFile(**{**vars(what), "nbytes": nbytes}))
            (part / CHECKPOINT).write_bytes(json.dumps(asdict(made[-1])).encode())

        with disk_errors(place):
            commit(place, write)
        return made[-1]

    def save_tensors(
        self, name: CheckpointName, what: CheckpointFile, tensors: Mapping[str, Tensor]
    ) -> CheckpointFile:
        """Have a checkpoint of tensors appear; see `save`."""
        return self.save(
            name, what, lambda part: save_file(dict(tensors), part / WEIGHTS, metadata=None)
        )

    def checkpoint(self, name: CheckpointName) -> CheckpointFile | None:
        """Return what a checkpoint is; None: there is none."""
        file = name.place(self.checkpoints) / CHECKPOINT
        if not file.is_file():
            return None
        values = self._read_json(file)
        return CheckpointFile(spec=AdapterSpec(**values.pop("spec")), **values)

    def checkpoint_tensors(self, name: CheckpointName) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint. `AdapterError`: it is damaged."""
        return _tensors(name.place(self.checkpoints) / WEIGHTS)

    def checkpoints_of(self, model: ModelName) -> list[CheckpointFile]:
        """Return the checkpoints of an adapter, the oldest first."""
        found = []
        for file in (self.checkpoints / model.folder).glob(f"*/*/{CHECKPOINT}"):
            with suppress(FileNotFoundError):  # because it is deleted meanwhile
                values = self._read_json(file)
                found.append(CheckpointFile(spec=AdapterSpec(**values.pop("spec")), **values))
        return sorted(found, key=lambda what: (what.created, what.path))

    def delete(self, name: CheckpointName) -> None:
        """Delete a checkpoint."""
        place = name.place(self.checkpoints)
        with disk_errors(place):
            discard(place)

    def free(self) -> int:
        """Bytes that are free where all this lies."""
        return shutil.disk_usage(self.directory).free

    def _write_json(self, file: Path, values: Mapping[str, Any]) -> None:
        replace_file(file, json.dumps(values).encode())

    def _read_json(self, file: Path) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(read_regular(file))
        return values


def _fill(part: Path, name: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), part / WEIGHTS)
    (part / name).write_bytes(json.dumps(values).encode())


def _numbered(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name.isdecimal()]


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except Exception as error:
        raise AdapterError("a saved state cannot be read", where=file.name) from error
