"""The server listens until it is told to end, and then ends in peace."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from lema.errors import ConfigError
from lema_tools.learner.access import Gate

__all__ = ["bound", "listen"]

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


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address. `ConfigError`: it is taken, or none of this machine."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, reuse_port=False)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"the server cannot listen there: {error}",
            where=f"--host {host} --port {port}",
            how="take another port, or an address of this machine",
        ) from error


def listen(app: Gate, listening: socket.socket) -> None:
    """Serve an application until SIGTERM or Ctrl-C. What is being done then is finished, and what
    waits is done after the next start.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_SECONDS,
        limit_concurrency=4096,
        h11_max_incomplete_event_size=65_536,
    )
    _Server(config).run(sockets=[listening])
