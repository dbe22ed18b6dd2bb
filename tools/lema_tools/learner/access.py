"""Who may ask, and how much: secrets of clients, sizes of requests, and how many there may be.

All is checked before a byte of a body is looked at.
"""

import base64
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from lema.errors import ConfigError
from lema.storage.diskspace import disk_errors
from lema.storage.regular import check_target, read_regular

__all__ = ["Gate", "Tokens"]

PREFIX = "tml-"  # what clients of the Tinker API begin their secrets with
FIRST = "default"
SHORTEST = 20  # characters of a secret
OPEN = ("/api/v1/healthz",)
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Tokens:
    """The secrets of clients: lines `NAME SECRET` of a file that only its owner reads.

    Args:
        digests: the digest of each secret, and whose it is.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = dict(digests)

    @classmethod
    def of(cls, file: Path) -> "Tokens":
        """Read a file of secrets; it is made, with one, if it is not there.

        Raises:
            ConfigError: others may read it, or it is no file of secrets.
            DiskError: it cannot be made.
        """
        check_target(file)
        if not file.exists():
            with disk_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                descriptor = os.open(file, flags, 0o600)
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(f"{FIRST} {PREFIX}{token_urlsafe(32)}\n".encode())
                    stream.flush()
                    os.fsync(stream.fileno())
        content = read_regular(file)
        if file.stat().st_mode & 0o077:
            raise ConfigError(
                "others may read the secrets", where=str(file), how=f"chmod 600 {file}"
            )
        digests = {}
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            name, _, secret = line.strip().partition(" ")
            if not line.strip() or line.startswith("#"):
                continue
            if not secret.startswith(PREFIX) or len(secret) < SHORTEST or not name.isidentifier():
                raise ConfigError(
                    "a line is no name and a secret",
                    where=f"{file}:{number}",
                    how=f"write NAME {PREFIX}SECRET, the secret of {SHORTEST} characters or more",
                )
            digests[_digest(secret)] = name
        if not digests:
            raise ConfigError("there is no secret", where=str(file), how="delete the file")
        return cls(digests)

    def owner(self, secret: str) -> str | None:
        """Return whose a secret is; None: nobody's."""
        asked = _digest(secret)
        found = None
        for digest, name in self._digests.items():
            if hmac.compare_digest(digest, asked):
                found = name
        return found


def _digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Gate:
    """Lets requests through to an application, once they are allowed.

    Args:
        app: the application; it finds the client's name in the scope, as `owner`.
        tokens: the secrets.
        most_bytes: of a body.
        rate: requests of a client in a second, in the long run.
        burst: requests of a client at once.
    """

    def __init__(
        self,
        app: App,
        tokens: Tokens,
        *,
        most_bytes: int,
        rate: float = 200.0,
        burst: float = 1000.0,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._most_bytes = most_bytes
        self._rate = rate
        self._burst = burst
        self._left: dict[str, tuple[float, float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        if scope["path"] not in OPEN:
            owner = self._tokens.owner(_secret(headers))
            if owner is None:
                await _refuse(send, 401, "the secret is missing, or is none of this server")
                return
            if not self._may_ask(owner):
                await _refuse(send, 429, "too many requests", retry_after="1")
                return
            scope["owner"] = owner
        if headers.get("content-encoding", "identity") != "identity":
            await _refuse(send, 415, "compressed bodies are not taken")
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes:
            await _refuse(send, 413, f"a request has {self._most_bytes} bytes at most")
            return
        body = await _read(receive, self._most_bytes)
        if body is None:
            await _refuse(send, 413, f"a request has {self._most_bytes} bytes at most")
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _may_ask(self, owner: str) -> bool:
        """Whether a client may ask once more now."""
        now = time.monotonic()
        left, at = self._left.get(owner, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        self._left[owner] = (left - 1 if left >= 1 else left, now)
        return left >= 1


def _secret(headers: Mapping[str, str]) -> str:
    """Return the secret of a request: a bearer's, a browser's password, or that of the API."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return headers.get("x-api-key", "")


async def _read(receive: Receive, most: int) -> bytes | None:
    """Return a body; None: it is too large."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Send, status: int, error: str, retry_after: str | None = None) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="LEMA learner", Bearer'))
    if retry_after is not None:
        headers.append((b"retry-after", retry_after.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
