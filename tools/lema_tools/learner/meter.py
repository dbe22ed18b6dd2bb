"""What a server has done so far, for its page and for Prometheus."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Meter", "ModelMeter"]

RECENT = 120  # losses of an adapter that its curve has
WINDOW = 60.0  # seconds that the speed is measured over


@dataclass(eq=False)
class ModelMeter:
    """What one adapter has done."""

    owner: str
    rank: int
    steps: int = 0
    tokens: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count_rows(self, tokens: int, loss: float) -> None:
        """Count the rows of a request, and their loss for each token."""
        self.tokens += tokens
        self.losses.append(loss)

    def count_steps(self, steps: int) -> None:
        """Note how many steps it has taken."""
        self.steps = steps


class Meter:
    """Counts; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._passes: deque[tuple[float, int]] = deque()
        self._models: dict[str, ModelMeter] = {}
        self.began = time.time()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def add_pass(
        self, *, rows: int, tokens: int, adapters: int, nbytes: int, seconds: float
    ) -> None:
        """Count a pass over the layers."""
        for name, amount in (
            ("passes", 1.0),
            ("rows", rows),
            ("tokens", tokens),
            ("pass_adapters", adapters),
            ("weight_bytes", nbytes),
            ("pass_seconds", seconds),
        ):
            self.add(name, amount)
        with self._lock:
            self._passes.append((time.monotonic(), tokens))

    def model(self, name: str, owner: str, rank: int) -> ModelMeter:
        """Return the counts of an adapter."""
        with self._lock:
            return self._models.setdefault(name, ModelMeter(owner, rank))

    def models(self) -> Mapping[str, ModelMeter]:
        """Return the counts of all adapters, by name."""
        with self._lock:
            return dict(self._models)

    def forget(self, name: str) -> None:
        """Forget an adapter."""
        with self._lock:
            self._models.pop(name, None)

    def counts(self) -> dict[str, float]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)

    def tokens_per_second(self) -> float:
        """Return the speed of the last minute."""
        now = time.monotonic()
        with self._lock:
            while self._passes and now - self._passes[0][0] > WINDOW:
                self._passes.popleft()
            tokens = sum(tokens for _, tokens in self._passes)
        return tokens / WINDOW

    def exposition(self, gauges: Mapping[str, float]) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        for name, value in sorted(self.counts().items()):
            yield f"# TYPE lema_learner_{name}_total counter"
            yield f"lema_learner_{name}_total {value:g}"
        for name, value in sorted(gauges.items()):
            yield f"# TYPE lema_learner_{name} gauge"
            yield f"lema_learner_{name} {value:g}"
