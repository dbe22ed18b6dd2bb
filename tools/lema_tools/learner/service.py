"""What the server does for its clients, without HTTP: sessions, adapters, requests and answers.

Its methods run on the event loop. What writes files runs in threads, so that no request waits for a
disk of another, and what touches the model is handed to the learner's thread.
"""

import asyncio
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from lema.errors import ConfigError, DataError, LemaError
from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.learner import Learner
from lema_tools.learner.answers import Answers, Recent
from lema_tools.learner.jobs import Job, Jobs
from lema_tools.learner.meter import Meter
from lema_tools.learner.names import (
    CheckpointName,
    ModelName,
    future_of,
    model_of_future,
    new_session,
)
from lema_tools.learner.protocol import LoraOptions, Sample
from lema_tools.learner.sampling import OwnSampler, ServedSampler
from lema_tools.learner.store import (
    CheckpointFile,
    Kind,
    ModelFile,
    Request,
    Result,
    Session,
    State,
    Store,
)
from lema_tools.learner.wire import RowsRequest, addressed, canonical, read_rows, sample_answer
from lema_tools.learner.worker import Worker

__all__ = ["Gone", "Limits", "NotThere", "Service"]

POLL_SECONDS = 20.0  # that an answer is waited for in one request
SILENT_SECONDS = 3600.0  # after which a session whose client says nothing counts as finished
Returned = TypeVar("Returned")


class NotThere(LemaError):
    """A client names what is not there, or is another's."""


class Gone(LemaError):
    """A client asks for an answer that was there, and is no more."""


@dataclass(frozen=True)
class Limits:
    """What clients may have.

    Args:
        rank: of an adapter, at most.
        head: whether adapters adapt the head, where clients ask for it.
        sessions: of a client that are live: neither finished, nor silent for an hour.
        models: adapters of a client's live sessions.
        checkpoints: of an adapter.
    """

    rank: int = 64
    head: bool = True
    sessions: int = 256
    models: int = 64
    checkpoints: int = 1024


@dataclass(frozen=True)
class SamplingSession:
    """What a client samples from. `checkpoint` None: the base model."""

    owner: str
    session: str
    checkpoint: CheckpointName | None


class Service:
    """A server's work.

    Args:
        name: what clients call the base model.
        learner: the model.
        store: what is kept on disk.
        limits: what clients may have.
        pass_tokens: tokens of a pass over the layers, at most.
        most_waiting: requests of an adapter that may wait.
        server: samples; None: the model itself does.
    """

    def __init__(
        self,
        name: str,
        learner: Learner,
        store: Store,
        limits: Limits,
        *,
        pass_tokens: int,
        most_waiting: int,
        server: ServedSampler | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.meter = Meter()
        self.jobs = Jobs(pass_tokens, most_waiting)
        self.answers = Answers()
        self.learner = learner
        self._store = store
        self._server = server
        self._own = OwnSampler(learner, store.checkpoints)
        published = self._own_published if server is None else server.publish
        self._worker = Worker(learner, store, self.jobs, self.answers, self.meter, published)
        self._sessions = store.sessions()
        # when each was heard of last; those of before are, when the server starts
        self._heard = dict.fromkeys(self._sessions, time.monotonic())
        self._models: dict[ModelName, ModelFile] = {}
        self._digests: Recent[tuple[ModelName, int], str] = Recent()
        self._arriving: dict[tuple[ModelName, int], asyncio.Lock] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._sampled: Recent[str, bool] = Recent()
        self._thread = threading.Thread(target=self._worker.run, name="learner", daemon=True)
        for model, what in store.models().items():
            self._reopen(model, what)

    def _own_published(self, name: CheckpointName, _: object) -> None:
        self._own.forget(name)

    def _reopen(self, model: ModelName, what: ModelFile) -> None:
        """Take an adapter on that was there before: what has no answer yet is done now."""
        state = self._store.state(model)
        answered = self._store.answered(model)
        last = state.seq_id
        while last + 1 in answered:
            last += 1
        self._know(model, what, last + 1)
        self.meter.model(str(model), what.owner, what.spec.rank).count_steps(state.steps)
        for request in self._store.requests(model):
            if request.seq_id > last:
                rows, error, digest = self._read(model, request.kind, request.body)
                self._digests[model, request.seq_id] = digest
                self.jobs.put(Job(model, request, digest, rows, error))

    def _know(self, model: ModelName, what: ModelFile, next_seq: int) -> None:
        self._models[model] = what
        self._worker.know(model, what)
        self.jobs.open_line(model, next_seq)

    def start(self) -> None:
        """Begin, on the event loop."""
        self.answers.start()
        self._thread.start()

    def stop(self) -> None:
        """End once the batch that is being done is; what waits is done after the next start."""
        self.answers.close()
        self.jobs.close()
        self._thread.join()

    # Sessions

    async def create_session(self, owner: str, metadata: Mapping[str, Any]) -> str:
        """Begin a session of a client. `ConfigError`: it has too many."""
        live = [name for name in self.sessions(owner) if self._is_live(name)]
        if len(live) >= self.limits.sessions:
            raise ConfigError(
                f"there are {len(live)} sessions already", how="finish one (ServiceClient.close)"
            )
        session = Session(new_session(), owner, time.time(), _texts(metadata))
        await _threaded(lambda: self._store.write_session(session))
        self._sessions[session.name] = session
        self.hear(owner, session.name)
        return session.name

    def _is_live(self, name: str) -> bool:
        """Whether a session has a client: it is not finished, and was heard of."""
        heard = self._heard.get(name, float("-inf"))
        return not self._sessions[name].finished and time.monotonic() - heard < SILENT_SECONDS

    def hear(self, owner: str, name: str) -> None:
        """Note that a client's session lives. `Gone`: it is finished; `NotThere`: it is not."""
        if self.session(owner, name).finished:
            raise Gone("the session is finished")
        self._heard[name] = time.monotonic()

    def session(self, owner: str, name: str) -> Session:
        """Return a session of a client. `NotThere`: it is not there."""
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise NotThere(f"there is no session {name!r:.80}")
        return session

    def sessions(self, owner: str) -> list[str]:
        """Return the sessions of a client."""
        return [name for name, session in self._sessions.items() if session.owner == owner]

    async def finish(self, owner: str, name: str) -> None:
        """End a session."""
        session = replace(self.session(owner, name), finished=True)
        await _threaded(lambda: self._store.write_session(session))
        self._sessions[name] = session

    # Adapters

    def models_of(self, owner: str, session: str | None = None) -> dict[ModelName, ModelFile]:
        """Return the adapters of a client, or of one session of his."""
        return {
            model: what
            for model, what in self._models.items()
            if what.owner == owner and session in (None, model.session)
        }

    def model(self, owner: str, text: str) -> tuple[ModelName, ModelFile]:
        """Return an adapter of a client. `NotThere`: it is not there; `DataError`: no name."""
        model = ModelName.read(text)
        what = self._models.get(model)
        if what is None or what.owner != owner:
            raise NotThere(f"there is no model {text!r:.80}")
        return model, what

    def check_base(self, name: str | None) -> None:
        """Make sure that a client means the model that is served. `NotThere`: it does not."""
        if name is not None and name != self.name:
            raise NotThere(f"this server has {self.name}, and not {name!r:.120}")

    async def create_model(
        self,
        owner: str,
        session: str,
        number: int,
        lora: LoraOptions,
        metadata: Mapping[str, Any],
    ) -> str:
        """Make an adapter, or find the one that the same request has made; return the name of the
        answer.
        """
        self.session(owner, session)
        model = ModelName(session, number)
        if model in self._models:
            return future_of(model, 0)
        self._check_room(owner, lora.rank)
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        head = lora.train_unembed and self.limits.head
        spec = AdapterSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, head)
        self.learner.check(spec)
        what = ModelFile(str(model), owner, time.time(), spec, _texts(metadata))
        await _threaded(lambda: self._store.write_model(model, what))
        self._know(model, what, 1)
        return future_of(model, 0)

    async def create_from(
        self,
        owner: str,
        session: str,
        number: int,
        path: str,
        metadata: Mapping[str, Any],
        *,
        optimizer: bool,
    ) -> str:
        """Make an adapter that begins with a checkpoint; return the name of the answer."""
        self.session(owner, session)
        model = ModelName(session, number)
        if model in self._models:
            return future_of(model, 0)
        name, there = self.checkpoint(owner, path)
        if name.kind != "weights":
            raise DataError("a checkpoint for sampling cannot train", where="path")
        self._check_room(owner, there.spec.rank)
        self.learner.check(there.spec)
        what = ModelFile(
            str(model), owner, time.time(), there.spec, _texts(metadata), path, optimizer
        )

        def write() -> None:
            tensors = self._store.checkpoint_tensors(name)
            if not optimizer:
                tensors = {key: of for key, of in tensors.items() if key.startswith("value/")}
            # the state first, because it is there when the adapter is
            self._store.make_model_folder(model)
            self._store.write_state(model, State(0, there.steps if optimizer else 0), tensors)
            self._store.write_model(model, what)

        await _threaded(write)
        self._know(model, what, 1)
        return future_of(model, 0)

    async def unload(self, owner: str, model_id: str) -> ModelName:
        """Take an adapter of a client off the device, until it is asked for something."""
        model, _ = self.model(owner, model_id)
        task = partial(self._worker.unload, model)
        self.jobs.put_task(Job(model, Request(0, "rows", b""), task=task))
        return model

    @staticmethod
    def texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
        """Return what a client says of something, as texts that are not too long."""
        return _texts(metadata or {})

    def _check_room(self, owner: str, rank: int) -> None:
        if rank > self.limits.rank:
            raise DataError(
                f"a rank of {rank} is more than this server has memory for",
                where="lora_config",
                how=f"ask for {self.limits.rank} at most",
            )
        live = [model for model in self.models_of(owner) if self._is_live(model.session)]
        if len(live) >= self.limits.models:
            raise ConfigError(
                f"your sessions have {len(live)} models already",
                how="save their states and finish a session (ServiceClient.close)",
            )

    # Requests of adapters

    async def accept_rows(self, owner: str, body: bytes) -> str:
        """Accept a request with rows; return the name of its answer.

        Raises:
            DataError: it is none.
            NotThere: its model is not there.
            Busy: too many requests wait.
        """
        model_id, seq_id = await _threaded(lambda: addressed(body))
        model, _ = self.model(owner, model_id)
        return await self._accept(model, seq_id, "rows", body)

    async def accept(
        self, owner: str, model_id: str, seq_id: int, kind: Kind, what: Mapping[str, Any]
    ) -> str:
        """Accept another request; see `accept_rows`."""
        model, _ = self.model(owner, model_id)
        return await self._accept(model, seq_id, kind, json.dumps(what, sort_keys=True).encode())

    async def _accept(self, model: ModelName, seq_id: int, kind: Kind, body: bytes) -> str:
        if seq_id < 1:
            raise DataError("the requests of a model are numbered from 1", where="seq_id")
        rows, error, digest = await _threaded(lambda: self._read(model, kind, body))
        # because a client whose connection has failed asks again, perhaps before it was answered
        arriving = self._arriving.setdefault((model, seq_id), asyncio.Lock())
        try:
            async with arriving:
                if self.jobs.is_known(model, seq_id):
                    await self._check_same(model, seq_id, digest)
                else:
                    self.jobs.check_room(model, seq_id)
                    request = Request(seq_id, kind, body)
                    await _threaded(lambda: self._store.append(model, request))
                    self._digests[model, seq_id] = digest
                    self.jobs.put(Job(model, request, digest, rows, error))
        finally:
            self._arriving.pop((model, seq_id), None)
        return future_of(model, seq_id)

    async def _check_same(self, model: ModelName, seq_id: int, digest: str) -> None:
        """Make sure that a request which comes again is the same."""
        before = self._digests.get((model, seq_id))
        if before is None:
            result = await _threaded(lambda: self._store.result(model, seq_id))
            before = None if result is None else result.digest
        if before is not None and before != digest:
            raise DataError(f"request {seq_id} of this model was another one", where="seq_id")

    def _read(
        self, model: ModelName, kind: Kind, body: bytes
    ) -> tuple[RowsRequest | None, str | None, str]:
        """Return the rows of a request, what is wrong with it, and the digest of what it says."""
        if kind != "rows":
            return None, None, _digest(kind.encode() + b"\n" + body)
        digest = _digest(canonical(body))
        rows = read_rows(body, self.learner.images)
        try:
            self.learner.check_rows(rows.of_adapter(model.folder))
        except (ConfigError, DataError) as error:
            return rows, f"{error.what}. {error.how}" if error.how else error.what, digest
        return rows, None, digest

    # Answers

    async def retrieve(self, owner: str, name: str) -> Result | None:
        """Wait for an answer for a while; None: it is not there yet.

        Raises:
            NotThere: nobody has asked for it, or another client has.
            Gone: it was there, and is no more.
        """
        find = self._finder(owner, name)
        if (result := await _threaded(find)) is not None:
            return result
        event = self.answers.expect(name)
        try:
            if (result := await _threaded(find)) is not None:
                return result
            if not self.answers.closing:
                try:
                    await asyncio.wait_for(event.wait(), POLL_SECONDS)
                except TimeoutError:
                    return None
            return await _threaded(find)
        finally:
            self.answers.forget(name, event)

    def _finder(self, owner: str, name: str) -> Callable[[], Result | None]:
        """Return what looks for an answer."""
        if (asked := model_of_future(name)) is None:
            sampler = self._samplers.get(name.rpartition(":")[0])
            if name not in self._sampled or sampler is None or sampler.owner != owner:
                raise Gone(f"there is no answer {name!r:.80} any more")
            return lambda: self.answers.kept(name)
        model, seq_id = asked
        _, what = self.model(owner, str(model))
        if seq_id == 0:
            created = {"model_id": str(model), "type": "create_model"}
            if what.begun is not None:
                created = {"model_id": str(model), "path": what.begun, "type": "load_weights"}
            return lambda: Result.of_json(created)
        if not self.jobs.is_known(model, seq_id):
            raise NotThere(f"request {seq_id} of this model has not arrived")

        def find() -> Result | None:
            if not self._worker.is_given(name):
                return None
            result = self.answers.kept(name) or self._store.result(model, seq_id)
            if result is None and seq_id <= self._store.state(model).seq_id:
                raise Gone(f"the answer {name} was kept for a while, and is no more")
            return result

        return find

    # Checkpoints

    def checkpoint(self, owner: str, path: str) -> tuple[CheckpointName, CheckpointFile]:
        """Return a checkpoint of a client. `NotThere`: it is not there; `DataError`: no path."""
        name = CheckpointName.read(path)
        there = self._store.checkpoint(name)
        if there is None or there.owner != owner:
            raise NotThere(f"there is no checkpoint {path!r:.160}")
        return name, there

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointFile]:
        """Return the checkpoints of a client, or of one adapter of his."""
        if model_id is not None:
            return self._store.checkpoints_of(self.model(owner, model_id)[0])
        models = self.models_of(owner)
        return [what for model in models for what in self._store.checkpoints_of(model)]

    async def delete_checkpoint(self, owner: str, model_id: str, kind: str, name: str) -> None:
        """Delete a checkpoint of a client."""
        model, _ = self.model(owner, model_id)
        named = CheckpointName.of(model, kind, name)
        self.checkpoint(owner, str(named))
        await _threaded(lambda: self._store.delete(named))

    # Sampling

    def create_sampler(
        self, owner: str, session: str, number: int, path: str | None, base: str | None
    ) -> str:
        """Return the name of what a client samples from."""
        self.session(owner, session)
        checkpoint = None
        if path is None:
            self.check_base(base)
        else:
            checkpoint, _ = self.checkpoint(owner, path)
            if checkpoint.kind != "sampler_weights":
                raise DataError(
                    "a checkpoint for training is not sampled from",
                    where="model_path",
                    how="save one with save_weights_for_sampler",
                )
        return self.know_sampler(owner, session, number, checkpoint)

    def know_sampler(
        self, owner: str, session: str, number: int, checkpoint: CheckpointName | None
    ) -> str:
        """Take note of what a client samples from; return its name."""
        name = f"{session}:sample:{number}"
        self._samplers[name] = SamplingSession(owner, session, checkpoint)
        return name

    def sampler(self, owner: str, name: str) -> SamplingSession:
        """Return what a client samples from. `Gone`: the server has been started since."""
        sampler = self._samplers.get(name)
        if sampler is None or sampler.owner != owner:
            raise Gone(f"there is no sampling session {name!r:.80}")
        return sampler

    def samplers_of(self, owner: str, session: str) -> list[str]:
        """Return what a session samples from."""
        return [
            name
            for name, sampler in self._samplers.items()
            if sampler.owner == owner and sampler.session == session
        ]

    async def sample(self, owner: str, asked: Sample) -> tuple[str, list[str]]:
        """Accept a request of texts; return the name of its answer, and of each text."""
        unable = [
            name
            for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
            if getattr(asked, name)
        ]
        unable += ["target_prompt_logprobs"] * (asked.target_prompt_logprobs is not None)
        unable += ["prompt_logprobs_last_n"] * (asked.prompt_logprobs_last_n is not None)
        if unable:
            raise DataError(f"this server does not return {', '.join(unable)}", where="asample")
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise DataError("a request of texts names its session and its number", where="asample")
        sampler = self.sampler(owner, asked.sampling_session_id)
        tokens = asked.prompt.tokens()
        longest = self.learner.longest
        wanted = len(tokens) + (asked.sampling_params.max_tokens or 0)
        if not tokens or max(tokens) >= self.learner.vocabulary or wanted > longest:
            raise DataError(
                "the prompt is empty, too long, or not of the vocabulary",
                where="prompt",
                how=f"prompt and text have {longest} tokens at most",
            )
        future = f"{asked.sampling_session_id}:{asked.seq_id}"
        ids = [f"{future}:{number}" for number in range(asked.num_samples)]
        if future not in self._sampled:
            self._sampled[future] = True
            self.meter.add("sampled_requests")
            if self._server is None or asked.prompt_logprobs:
                nothing = Request(0, "rows", b"")
                task = self._sampling(self._own, sampler, asked, tokens, future)
                self.jobs.put_task(Job(ModelName("0", 0), nothing, task=task))
            else:
                task = self._sampling(self._server, sampler, asked, tokens, future)
                asyncio.get_running_loop().run_in_executor(None, task)
        return future, ids

    def _sampling(
        self,
        source: OwnSampler | ServedSampler,
        sampler: SamplingSession,
        asked: Sample,
        tokens: list[int],
        future: str,
    ) -> Callable[[], None]:
        """Return what samples texts, and brings the answer."""

        def task() -> None:
            try:
                texts = source.sample(
                    sampler.checkpoint, tokens, asked.num_samples, asked.sampling_params
                )
                logprobs = None
                if asked.prompt_logprobs:
                    logprobs = self._own.prompt_logprobs(sampler.checkpoint, tokens)
                result = Result("proto", sample_answer(texts, logprobs), "")
            except LemaError as error:
                result = Result.of_error(str(error.what), "server")
            except Exception as error:  # noqa: BLE001 - the client is told, and the others go on
                result = Result.of_error(f"sampling failed: {type(error).__name__}", "server")
            self.answers.bring(future, result)

        return task


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {str(key)[:512]: str(value)[:4096] for key, value in metadata.items()}


async def _threaded(work: Callable[[], Returned]) -> Returned:
    return await asyncio.to_thread(work)
