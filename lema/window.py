"""What happened in a run since a moment: losses, tokens, and what streaming cost."""

from __future__ import annotations

from dataclasses import dataclass

from lema.stream.counters import StreamCounters

__all__ = ["Window", "since"]


@dataclass
class Window:
    """What happened since `began`: between two lines of metrics, or over the whole run."""

    began: float
    counters: StreamCounters
    loss: float = 0.0
    trained_tokens: int = 0
    tokens: int = 0

    def add(self, loss: float, trained: int, tokens: int) -> None:
        """Count a step: its mean loss, the tokens it trained, and all its tokens."""
        self.loss += loss * trained
        self.trained_tokens += trained
        self.tokens += tokens

    @property
    def mean_loss(self) -> float:
        """The mean loss of all trained tokens."""
        return self.loss / max(self.trained_tokens, 1)


def since(then: StreamCounters, now: StreamCounters) -> dict[str, float]:
    """Return what streaming cost between two looks at its counters."""
    names = (
        "bytes_read",
        "bytes_uploaded",
        "bytes_gathered",
        "bytes_offloaded",
        "layers_read",
        "layers_kept",
        "seconds_blocked_disk",
        "seconds_blocked_upload",
        "seconds_blocked_compute",
        "seconds_blocked_gather",
    )
    return {name: getattr(now, name) - getattr(then, name) for name in names}
