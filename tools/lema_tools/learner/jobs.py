"""What waits for the learner: requests of adapters in their order, taken fairly.

Requests of one adapter run in the order of their numbers, whatever order they come in. Whoever was
served longest ago is served first, and all rows that wait, of whichever adapter, make one pass as
long as they are not too many.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lema_tools.learner.names import ModelName
from lema_tools.learner.store import Request
from lema_tools.learner.wire import RowsRequest

__all__ = ["Batch", "Busy", "Job", "Jobs"]

GAP_SECONDS = 60.0  # that a request waits for one before it which does not come


class Busy(Exception):
    """So many requests of an adapter wait that no more are taken now."""


@dataclass(frozen=True, eq=False)
class Job:
    """A request that was accepted.

    Args:
        model: whose adapter.
        request: the request.
        digest: of what it says.
        rows: what it says, if it has rows.
        error: why it will fail, which is answered in its turn; None: nothing is known against it.
        task: what is done instead, of a job that is no request of an adapter in its order.
        arrived: when.
    """

    model: ModelName
    request: Request
    digest: str = ""
    rows: RowsRequest | None = None
    error: str | None = None
    task: Callable[[], None] | None = None
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        """Tokens of its rows."""
        return 0 if self.rows is None else sum(len(datum.tokens) for datum in self.rows.data)


@dataclass(frozen=True, eq=False)
class Batch:
    """Jobs that are done at once: rows of one pass, or a single other job."""

    jobs: tuple[Job, ...]

    @property
    def is_pass(self) -> bool:
        """Whether it is a pass over the layers."""
        return self.jobs[0].rows is not None and self.jobs[0].error is None

    @property
    def forward_only(self) -> bool:
        """Whether the pass forms no gradient."""
        return self.jobs[0].rows is not None and self.jobs[0].rows.forward_only


@dataclass(eq=False)
class _Line:
    """The requests of one adapter."""

    next: int
    waiting: dict[int, Job] = field(default_factory=dict)
    served: int = 0  # when it was served last, counted in batches

    def head(self) -> Job | None:
        """Return the one whose turn it is; None: it is not there."""
        return self.waiting.get(self.next)

    def take(self) -> Job:
        """Take it off."""
        job = self.waiting.pop(self.next)
        self.next += 1
        return job

    def serve(self, count: int) -> None:
        """Note when it was served."""
        self.served = count

    def skip_to(self, seq_id: int) -> None:
        """Go on with a later request."""
        self.next = seq_id


class Jobs:
    """The requests that wait; any thread may call it.

    Args:
        pass_tokens: tokens of a pass at most, but for its first request.
        most_waiting: requests of one adapter that may wait.
        gap_seconds: how long a request waits for one before it.
    """

    def __init__(
        self, pass_tokens: int, most_waiting: int, gap_seconds: float = GAP_SECONDS
    ) -> None:
        self._pass_tokens = pass_tokens
        self._most_waiting = most_waiting
        self._gap_seconds = gap_seconds
        self._lines: dict[ModelName, _Line] = {}
        self._tasks: list[Job] = []
        self._changed = threading.Condition()
        self._count = 0
        self._closed = False

    def open_line(self, model: ModelName, next_seq: int) -> None:
        """Take requests of an adapter, from this number on."""
        with self._changed:
            self._lines.setdefault(model, _Line(next_seq))

    def close_line(self, model: ModelName) -> list[Job]:
        """Take no more requests of an adapter; return those that wait."""
        with self._changed:
            line = self._lines.pop(model, None)
            return [] if line is None else [*line.waiting.values()]

    def check_room(self, model: ModelName, seq_id: int) -> None:
        """Make sure that a request of an adapter may wait. `Busy`: too many wait already."""
        with self._changed:
            line = self._lines[model]
            if len(line.waiting) >= self._most_waiting and seq_id != line.next:
                raise Busy

    def is_known(self, model: ModelName, seq_id: int) -> bool:
        """Whether a request of this number waits, or has had its turn."""
        with self._changed:
            line = self._lines[model]
            return seq_id < line.next or seq_id in line.waiting

    def put(self, job: Job) -> None:
        """Have a request wait for its turn, unless it had it: of two that a client has sent at
        once, the second may come when the first is done.
        """
        with self._changed:
            line = self._lines[job.model]
            if job.request.seq_id >= line.next:
                line.waiting.setdefault(job.request.seq_id, job)
            self._changed.notify_all()

    def put_task(self, job: Job) -> None:
        """Have a task wait that has no place in an order."""
        with self._changed:
            self._tasks.append(job)
            self._changed.notify_all()

    def waiting(self) -> Mapping[ModelName, int]:
        """Return how many requests of each adapter wait."""
        with self._changed:
            return {model: len(line.waiting) for model, line in self._lines.items()}

    @property
    def num_tasks(self) -> int:
        """How many tasks wait."""
        with self._changed:
            return len(self._tasks)

    def close(self) -> None:
        """Hand out no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, linger: float = 0.0) -> Batch | None:
        """Wait for jobs, and return those that are done next; None: it was closed.

        Args:
            linger: seconds that rows wait for rows of others, so that one pass serves all.
        """
        with self._changed:
            while not self._closed:
                self._fail_gaps()
                if (single := self._single()) is not None:
                    return Batch((single,))
                if self._ready():
                    if linger:
                        self._changed.wait(linger)
                        linger = 0.0
                        continue
                    return Batch(tuple(self._pass()))
                self._changed.wait(1.0)
        return None

    def _ready(self) -> list[tuple[ModelName, _Line]]:
        """Return the lines whose turn has come, the one that was served longest ago first."""
        ready = [(model, line) for model, line in self._lines.items() if line.head() is not None]
        return sorted(ready, key=lambda pair: (pair[1].served, _arrived(pair[1])))

    def _single(self) -> Job | None:
        """Take a job that is no pass. They come first, because rows may wait behind them."""
        for _, line in self._ready():
            job = line.head()
            if job is not None and (job.rows is None or job.error is not None):
                return line.take()
        # a pass goes before tasks, but no two
        if self._tasks and (not self._ready() or self._count % 2):
            self._count += 1
            return self._tasks.pop(0)
        return None

    def _pass(self) -> Iterable[Job]:
        """Take the rows of a pass: of each adapter in turn, as long as they are not too many."""
        self._count += 1
        taken: list[Job] = []
        tokens = 0
        ready = self._ready()
        first = ready[0][1].head()
        assert first is not None and first.rows is not None
        kind = first.rows.forward_only
        more = True
        while more:
            more = False
            for _, line in ready:
                job = line.head()
                if job is None or job.rows is None or job.error is not None:
                    continue
                fits = not taken or tokens + job.tokens <= self._pass_tokens
                if fits and job.rows.forward_only == kind:
                    taken.append(line.take())
                    tokens += job.tokens
                    line.serve(self._count)
                    more = True
        return taken

    def _fail_gaps(self) -> None:
        """Go on with requests that wait for one which does not come; they fail."""
        now = time.monotonic()
        for line in self._lines.values():
            if line.head() is not None or not line.waiting:
                continue
            earliest = min(line.waiting)
            if now - min(job.arrived for job in line.waiting.values()) < self._gap_seconds:
                continue
            missing = f"request {line.next} of this model has not arrived, so this one is not done"
            for seq_id, job in line.waiting.items():
                if job.error is None:
                    line.waiting[seq_id] = Job(
                        job.model, job.request, job.digest, job.rows, missing, None, job.arrived
                    )
            line.skip_to(earliest)


def _arrived(line: _Line) -> float:
    job = line.head()
    return 0.0 if job is None else job.arrived
