"""The server listens until it is told to end, and then ends in peace."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from lema_tools.learner.access import Gate

__all__ = ["listen"]

GRACE_SECONDS = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """Ends at a signal, which is not raised once more behind it: the end was asked for."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(app: Gate, host: str, port: int) -> None:
    """Serve an application until SIGTERM or Ctrl-C. What is being done then is finished, and what
    waits is done after the next start.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_SECONDS,
        limit_concurrency=4096,
        h11_max_incomplete_event_size=65_536,
    )
    _Server(config).run()
