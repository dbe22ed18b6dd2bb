"""The learner's thread: it alone touches the model.

An adapter is on the device from its first request on, until others need the room. Its values are
those of its last step on disk, and the requests since then, taken again: they make the same bits,
so a client cannot tell a server that was killed, or an adapter that was away, from another.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from lema.errors import ConfigError, DataError, LemaError, MemoryLimitError
from lema.train.learner.adapter import AdamSettings
from lema.train.learner.heads import Scored
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows
from lema_tools.learner.answers import Answers
from lema_tools.learner.jobs import Batch, Job, Jobs
from lema_tools.learner.meter import Meter, ModelMeter
from lema_tools.learner.names import CheckpointName, ModelName, future_of
from lema_tools.learner.store import (
    CheckpointFile,
    Kind,
    ModelFile,
    Request,
    Result,
    State,
    Store,
)
from lema_tools.learner.wire import read_rows, scored_answer

__all__ = ["Published", "Worker"]

LINGER = 0.01  # seconds that rows wait for those of others
LOG = logging.getLogger("lema.learner")
Published = Callable[[CheckpointName, Path], None]
"""Is told of an adapter's files that have appeared."""


class Worker:
    """Does what clients ask for, one batch after the other.

    Args:
        learner: the model.
        store: what is kept on disk.
        jobs: what waits.
        answers: wakes those who wait for answers.
        meter: counts what is done.
        published: is told of files for a sampler.
    """

    def __init__(
        self,
        learner: Learner,
        store: Store,
        jobs: Jobs,
        answers: Answers,
        meter: Meter,
        published: Published,
    ) -> None:
        self._learner = learner
        self._store = store
        self._jobs = jobs
        self._answers = answers
        self._meter = meter
        self._published = published
        self._models: dict[ModelName, ModelFile] = {}
        self._resident: OrderedDict[ModelName, None] = OrderedDict()
        # answers that are on disk before what they tell of is, and are not given yet
        self._ungiven: set[str] = set()
        self._steps: dict[Kind, Callable[[Job], None]] = {
            "optim_step": self._optim_step,
            "load": self._load,
            "save": self._save,
            "save_for_sampler": self._save_for_sampler,
        }

    def know(self, model: ModelName, what: ModelFile) -> None:
        """Take an adapter on."""
        self._models[model] = what

    def run(self) -> None:
        """Do what waits, until the queue is closed."""
        while (batch := self._jobs.take(LINGER)) is not None:
            self.do(batch)

    def do(self, batch: Batch) -> None:
        """Do the jobs of a batch, and bring their answers."""
        first = batch.jobs[0]
        if first.task is not None:
            first.task()
        elif batch.is_pass:
            self._pass(batch.jobs)
        else:
            self._single(first)

    def _single(self, job: Job) -> None:
        """Do a job that is no pass."""
        try:
            if job.error is not None:
                raise DataError(job.error)
            self._activate(job.model, job.request.seq_id)
            self._steps[job.request.kind](job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the others go on
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        """Answer that a job could not be done; nothing of it stays."""
        model = job.model
        if job.error is None and not isinstance(error, ConfigError | DataError):
            self._park(model)  # because it may be half done
        if not isinstance(error, LemaError):
            LOG.error("a request of %s failed", model, exc_info=error)
        result = _failure(error, job.digest)
        name = future_of(model, job.request.seq_id)
        self._meter.add("failed_requests")
        kept = None
        try:
            self._store.write_result(model, job.request.seq_id, result)
        except LemaError:
            self._store.forget_result(model, job.request.seq_id)
            kept = result
        # so that it is not taken once more, since its client is told that it failed
        self._store.forget_request(model, job.request.seq_id)
        self._ungiven.discard(name)
        self._answers.bring(name, kept)

    def is_given(self, name: str) -> bool:
        """Whether an answer that is on disk may be given."""
        return name not in self._ungiven

    def _finish(self, job: Job, result: Result) -> None:
        """Answer a job."""
        self._store.write_result(job.model, job.request.seq_id, result)
        self._answers.bring(future_of(job.model, job.request.seq_id))

    def _finish_step(self, job: Job, result: Result) -> None:
        """Answer a job that has changed values: first its answer is on disk, then they are, then it
        is given. A kill between the two has the job done once more, with the same outcome.
        """
        name = future_of(job.model, job.request.seq_id)
        self._ungiven.add(name)
        self._store.write_result(job.model, job.request.seq_id, result)
        self._write_state(job.model, job.request.seq_id)
        self._ungiven.discard(name)
        self._answers.bring(name)

    def _write_state(self, model: ModelName, seq_id: int) -> None:
        adapter = self._learner.adapters[model.folder]
        self._store.write_state(model, State(seq_id, adapter.steps), adapter.state())

    def _optim_step(self, job: Job) -> None:
        norm = self._learner.step(job.model.folder, AdamSettings(**json.loads(job.request.body)))
        self._finish_step(job, Result.of_json({"metrics": {"grad_norm:mean": norm}}, job.digest))
        self._meter.add("optimizer_steps")
        self._meter_of(job.model).count_steps(self._learner.adapters[job.model.folder].steps)

    def _load(self, job: Job) -> None:
        asked = json.loads(job.request.body)
        name = CheckpointName.read(asked["path"])
        tensors = self._store.checkpoint_tensors(name)
        what = self._store.checkpoint(name)
        assert what is not None, "it was there when the request was accepted"
        adapter = self._learner.adapters[job.model.folder]
        adapter.restore(tensors, steps=what.steps, optimizer=asked["optimizer"])
        answer = {"path": str(name), "model_id": str(job.model), "type": "load_weights"}
        self._finish_step(job, Result.of_json(answer, job.digest))

    def _save(self, job: Job) -> None:
        asked = json.loads(job.request.body)
        name = CheckpointName.of(job.model, "weights", asked["name"])
        adapter = self._learner.adapters[job.model.folder]
        what = self._checkpoint(job, name, asked)
        if what is not None:
            self._store.save_tensors(name, what, adapter.state())
        answer = {"path": str(name), "type": "save_weights"}
        self._finish(job, Result.of_json(answer, job.digest))

    def _save_for_sampler(self, job: Job) -> None:
        asked = json.loads(job.request.body)
        name = CheckpointName.of(job.model, "sampler_weights", asked["name"])
        # because the adapter may be older than the choice of the server that reads it
        self._learner.check(self._models[job.model].spec)
        what = self._checkpoint(job, name, asked)
        if what is not None:
            self._store.save(name, what, lambda part: self._publish(job.model, part))
        self._published(name, name.place(self._store.checkpoints))
        answer = {"path": str(name), "type": "save_weights_for_sampler"}
        if asked.get("sampling_session") is not None:
            answer["sampling_session_id"] = asked["sampling_session"]
        self._finish(job, Result.of_json(answer, job.digest))

    def _publish(self, model: ModelName, part: Path) -> None:
        """Write PEFT's files of an adapter into a directory."""
        self._learner.publish(model.folder, part)
        inside = part / model.folder
        for file in inside.iterdir():
            file.rename(part / file.name)
        inside.rmdir()
        (part / "README.md").unlink(missing_ok=True)  # because PEFT writes one about nothing

    def _checkpoint(
        self, job: Job, name: CheckpointName, asked: dict[str, object]
    ) -> CheckpointFile | None:
        """Return what a checkpoint is to say of itself; None: this request has made it already."""
        request = future_of(job.model, job.request.seq_id)
        there = self._store.checkpoint(name)
        if there is not None and there.request == request:
            return None
        if there is not None and not asked.get("overwrite"):
            raise DataError(
                f"there is a checkpoint {name} already",
                where="path",
                how="take another name, or overwrite it",
            )
        file = self._models[job.model]
        metadata = asked.get("metadata")
        return CheckpointFile(
            str(name),
            file.owner,
            time.time(),
            file.spec,
            self._learner.adapters[job.model.folder].steps,
            request,
            metadata=metadata if isinstance(metadata, dict) else {},
        )

    def _pass(self, jobs: Sequence[Job]) -> None:
        """Take rows of some requests through the model, and answer each."""
        left: list[Job] = []
        ready: list[Job] = []
        needed: set[ModelName] = set()
        for job in jobs:
            try:
                self._activate(job.model, job.request.seq_id, keep=needed)
                needed.add(job.model)
                ready.append(job)
            except MemoryLimitError as error:
                if needed:
                    left.append(job)  # for another pass, since the device does not hold all
                else:
                    self._fail(job, error)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(job, error)
        if ready:
            self._run(ready)
        if left:
            self._pass(left)

    def _run(self, jobs: Sequence[Job]) -> None:
        began = time.monotonic()
        before = self._learner.counters.bytes_uploaded
        requests = [_rows_of(job) for job in jobs]
        forward_only = jobs[0].rows is not None and jobs[0].rows.forward_only
        try:
            outcomes = self._learner.run(requests, differentiate=not forward_only)
        except Exception as error:  # noqa: BLE001 - as above
            for model in {job.model for job in jobs}:
                self._park(model)  # because gradients may be there in part
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            LOG.warning("a pass of %d requests failed, so each runs alone: %s", len(jobs), error)
            for job in jobs:
                self._pass([job])
            return
        self._meter.add_pass(
            rows=sum(len(request.data) for request in requests),
            tokens=sum(request.num_tokens for request in requests),
            adapters=len({job.model for job in jobs}),
            nbytes=self._learner.counters.bytes_uploaded - before,
            seconds=time.monotonic() - began,
        )
        for job, request, scored in zip(jobs, requests, outcomes, strict=True):
            self._answer_rows(job, request, scored)

    def _answer_rows(self, job: Job, request: AdapterRows, scored: Scored) -> None:
        meter = self._meter_of(job.model)
        meter.count_rows(request.num_tokens, scored.loss / max(1, request.num_tokens))
        try:
            if scored.error is not None:
                result = _failure(scored.error, job.digest, category="user")
            else:
                result = Result("proto", scored_answer(scored), job.digest)
            self._finish(job, result)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(job, error)

    def _meter_of(self, model: ModelName) -> ModelMeter:
        file = self._models[model]
        return self._meter.model(str(model), file.owner, file.spec.rank)

    def _activate(self, model: ModelName, seq_id: int, keep: Collection[ModelName] = ()) -> None:
        """Have an adapter on the device as it is before a request, whose turn it is.

        Args:
            model: the adapter.
            seq_id: the number of the request.
            keep: adapters that stay on the device.

        Raises:
            MemoryLimitError: the device does not hold it beside those.
        """
        if model in self._resident:
            self._resident.move_to_end(model)
            return
        file = self._models[model]
        while True:
            try:
                adapter = self._learner.add(model.folder, file.spec)
                break
            except MemoryLimitError:
                others = [other for other in self._resident if other not in keep]
                if not others:
                    raise
                self._park(others[0])
        self._resident[model] = None
        try:
            state = self._store.state(model)
            if tensors := self._store.state_tensors(model):
                adapter.restore(tensors, steps=state.steps, optimizer=True)
            self._replay(model, state, seq_id)
        except BaseException:
            self._park(model)
            raise

    def _replay(self, model: ModelName, state: State, before: int) -> None:
        """Take the requests since an adapter's last step once more; nothing is answered again."""
        learner = self._learner
        rows: list[AdapterRows] = []

        def flush() -> None:
            if rows:
                learner.run(rows)
                self._meter.add("replayed_requests", len(rows))
            rows.clear()

        for request in self._store.requests(model):
            if not state.seq_id < request.seq_id < before:
                continue
            result = self._store.result(model, request.seq_id)
            if result is None or result.kind == "error":
                continue
            if request.kind == "rows":
                if (again := self._rows_again(model, request)) is not None:
                    rows.append(again)
            elif request.kind in ("optim_step", "load"):
                flush()
                if request.kind == "optim_step":
                    learner.step(model.folder, AdamSettings(**json.loads(request.body)))
                else:
                    self._load_again(model, request)
                self._write_state(model, request.seq_id)
        flush()

    def _rows_again(self, model: ModelName, request: Request) -> AdapterRows | None:
        """Return the rows of a request whose gradients are needed again; None: it has formed
        none.
        """
        try:
            rows = read_rows(request.body, self._learner.images)
            again = rows.of_adapter(model.folder)
            self._learner.check_rows(again)
        except (ConfigError, DataError):
            return None
        return None if rows.forward_only else again

    def _load_again(self, model: ModelName, request: Request) -> None:
        asked = json.loads(request.body)
        name = CheckpointName.read(asked["path"])
        what = self._store.checkpoint(name)
        steps = 0 if what is None else what.steps
        self._learner.adapters[model.folder].restore(
            self._store.checkpoint_tensors(name), steps=steps, optimizer=asked["optimizer"]
        )

    def _park(self, model: ModelName) -> None:
        """Take an adapter off the device."""
        if model in self._resident:
            del self._resident[model]
            if model.folder in self._learner.adapters:
                self._learner.remove(model.folder)

    def unload(self, model: ModelName) -> None:
        """Take an adapter off the device; it comes back when it is asked for something."""
        self._park(model)


def _rows_of(job: Job) -> AdapterRows:
    assert job.rows is not None, "a pass has rows"
    return job.rows.of_adapter(job.model.folder)


def _failure(error: Exception, digest: str, category: str | None = None) -> Result:
    """Return what a client is told of an error."""
    if isinstance(error, LemaError):
        theirs = isinstance(error, ConfigError | DataError)
        text = f"{error.what}. {error.how}" if error.how else error.what
        return Result.of_error(text, category or ("user" if theirs else "server"), digest)
    text = f"the server failed: {type(error).__name__}"
    return Result.of_error(text, "server", digest)
