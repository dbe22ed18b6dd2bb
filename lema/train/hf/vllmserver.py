"""vLLM's server, as far as adapters and completions go: a client of its HTTP interface.

The server was started with `--enable-lora` and with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its
environment. It reads adapters from directories, so it sees the same files. Source: the OpenAI
server of vLLM 0.32.0, `vllm/entrypoints/openai` and `vllm/entrypoints/serve/lora`.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor

from lema.errors import ConfigError, LemaError

__all__ = ["CHOICES_OPTION", "Completion", "VLLMServer"]

START = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank N"
CHOICES_OPTION = "--enable-return-routed-experts"  # has a server tell which experts it chose
PATIENCE = 600.0  # seconds that an answer may take


@dataclass(frozen=True)
class Completion:
    """What a server has sampled after a prompt."""

    token_ids: list[int]
    logprobs: list[float]  # of each of these tokens, as it was sampled
    # which experts the server chose, `[tokens before the last, layers, experts of each]`, for the
    # prompt and the completion; None: it does not tell
    choices: Tensor | None = None


class VLLMServer:
    """A server at a URL.

    Args:
        url: such as http://localhost:8000.
        timeout: seconds to wait for a server that does not answer.
        note: takes a sentence on a server that is waited for.
    """

    def __init__(
        self, url: str, timeout: float = 240.0, note: Callable[[str], object] = print
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._note = note

    def wait(self) -> None:
        """Wait until the server answers; `LemaError`: it does not within the timeout."""
        began = time.monotonic()
        has_noted = False
        while True:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    break
            except (OSError, HTTPException):
                if not has_noted:
                    self._note(
                        f"the server at {self.url} does not answer; waiting for it, at most "
                        f"{self._timeout:g} s"
                    )
                    has_noted = True
            if time.monotonic() - began >= self._timeout:
                what = f"the server did not answer for {self._timeout:g} s"
                raise LemaError(what, where=self.url, how=f"start it: {START}")
            time.sleep(min(1.0, self._timeout / 10))
        if has_noted:
            self._note(f"the server at {self.url} answers again")

    def names(self) -> set[str]:
        """Return the names of the model and of the adapters that the server has. `ConfigError`: it
        is no server of vLLM."""
        return {*self._parents()}

    def base(self) -> str:
        """Return the name of the model, of which the adapters are. `ConfigError`: the server has no
        model, or is none of vLLM.
        """
        for name, parent in self._parents().items():
            if parent is None:
                return name
        raise ConfigError("the server has no model", where=self.url, how=f"start one: {START}")

    def _parents(self) -> dict[str, str | None]:
        """Return of what each is an adapter, by name; None: it is the model."""
        try:
            cards = self._asked("/v1/models")["data"]
            return {card["id"]: card.get("parent") for card in cards}
        except (HTTPError, KeyError) as error:
            what = f"what answers here is no server of vLLM: {error}"
            raise ConfigError(what, where=self.url, how=f"start one: {START}") from error

    def load(self, name: str, directory: Path, *, stacked: bool = False) -> None:
        """Have the server read an adapter.

        Args:
            name: what requests call it.
            directory: of PEFT's files, as the server sees it.
            stacked: whether experts are in one tensor, which the server does not look for.

        Raises:
            ConfigError: the server takes no adapters, or not this one.
        """
        what: dict[str, Any] = {"lora_name": name, "lora_path": str(directory)}
        if stacked:
            what["is_3d_lora_weight"] = True
        try:
            self._asked("/v1/load_lora_adapter", what)
        except HTTPError as error:
            message = error.read().decode("utf-8", "replace").strip()
            how = "see the message" if error.code != 404 else f"start it so: {START}"
            raise ConfigError(
                f"the server did not load the adapter (HTTP {error.code}): {message}",
                where=f"{self.url}, {directory}",
                how=how,
            ) from error

    def unload(self, name: str) -> None:
        """Have the server forget an adapter, if it has it. `ConfigError`: it refuses to."""
        try:
            self._asked("/v1/unload_lora_adapter", {"lora_name": name})
        except HTTPError as error:
            if error.code not in (400, 404):
                what = f"the server did not forget an adapter (HTTP {error.code})"
                raise ConfigError(
                    what, where=f"{self.url}, {name}", how=f"start it so: {START}"
                ) from error

    def complete(
        self, name: str, prompt: Sequence[int], count: int, **sampling: object
    ) -> list[Completion]:
        """Sample completions.

        Args:
            name: of the adapter.
            prompt: its token ids.
            count: how many completions.
            sampling: vLLM's sampling parameters.

        Returns:
            The completions.

        Raises:
            ConfigError: the server refuses the request.
        """
        asked = {
            "model": name,
            "prompt": list(prompt),
            "n": count,
            "logprobs": 0,
            "return_token_ids": True,
            **sampling,
        }
        try:
            choices = self._asked("/v1/completions", asked)["choices"]
        except HTTPError as error:
            message = error.read().decode("utf-8", "replace").strip()
            what = f"the server made no completions (HTTP {error.code}): {message}"
            raise ConfigError(what, where=self.url, how="see the message") from error
        return [
            Completion(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                _array(choice.get("routed_experts")),
            )
            for choice in sorted(choices, key=lambda choice: choice["index"])
        ]

    def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request, a POST where it has a body. `OSError`: there was
        none; `HTTPError`, which is one: the server refuses it."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        if not text.startswith("{"):
            return {"text": text}
        answer_body: dict[str, Any] = json.loads(text)
        return answer_body


def _array(text: str | None) -> Tensor | None:
    """Return an array of integers that is written as the base64 of an `.npy` file."""
    if text is None:
        return None
    array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return torch.from_numpy(array.astype(np.int32))
