"""Texts that clients ask for: of a server of vLLM that was named, or by LEMA's own generation."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lema.model.layers.adapters import computing_with
from lema.train.hf.vllmserver import VLLMServer
from lema.train.learner.learner import EMPTY, Learner
from lema.train.learner.rows import AdapterRows, Datum
from lema_tools.learner.names import CheckpointName
from lema_tools.learner.protocol import SamplingParams
from lema_tools.learner.wire import SampledText

__all__ = ["OwnSampler", "ServedSampler", "name_for_server"]

KEPT = 4  # versions of an adapter that a server keeps
MOST_TOKENS = 1024  # of a text whose length is not limited
SAMPLER = "sampler"


def name_for_server(name: CheckpointName) -> str:
    """Return what a server calls an adapter."""
    return f"{name.model.folder}-{name.name}"


@dataclass(frozen=True)
class ServedSampler:
    """Samples by a server of vLLM, which reads adapters from the same disk.

    Args:
        server: the server.
        base: what it calls the base model.
    """

    server: VLLMServer
    base: str

    @classmethod
    def at(cls, url: str) -> "ServedSampler":
        """Return the one at a URL, once it answers. `ConfigError`: it has no model."""
        server = VLLMServer(url)
        server.wait()
        return cls(server, server.base())

    def publish(self, name: CheckpointName, directory: Path) -> None:
        """Have the server read an adapter, and forget the oldest of its model."""
        called = name_for_server(name)
        there = self.server.names()
        if called in there:
            self.server.unload(called)
        self.server.load(called, directory.absolute())
        others = sorted(
            other
            for other in there - {called}
            if other.startswith(f"{name.model.folder}-ephemeral-")
        )
        for other in others[: max(0, len(others) - KEPT + 1)]:
            self.server.unload(other)

    def sample(
        self, name: CheckpointName | None, prompt: Sequence[int], count: int, asked: SamplingParams
    ) -> list[SampledText]:
        """Return texts that follow a prompt. `ConfigError`: the server refuses."""
        called = self.base if name is None else name_for_server(name)
        options: dict[str, Any] = {
            "temperature": asked.temperature,
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "max_tokens": asked.max_tokens or MOST_TOKENS,
        }
        if asked.seed is not None:
            options["seed"] = asked.seed
        if asked.stop == []:
            options["ignore_eos"] = True
        elif asked.stop:
            stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
            numbers = isinstance(stops[0], int)
            options["stop_token_ids" if numbers else "stop"] = stops
        most = options["max_tokens"]
        return [
            SampledText(text.token_ids, text.logprobs, stopped=len(text.token_ids) < most)
            for text in self.server.complete(called, prompt, count, **options)
        ]


class OwnSampler:
    """Samples by the learner's own model: a token of a batch reads the weights once.

    Args:
        learner: the model.
        checkpoints: the directory of all checkpoints.
    """

    def __init__(self, learner: Learner, checkpoints: Path) -> None:
        self._learner = learner
        self._checkpoints = checkpoints
        self._loaded: CheckpointName | None = None

    def _adapter(self, name: CheckpointName | None) -> str:
        """Return the adapter of a checkpoint in the model; it is read if it is not there."""
        if name is None:
            return EMPTY
        if name != self._loaded:
            model: Any = self._learner.model
            if self._loaded is not None:
                self._loaded = None
                model.delete_adapter(SAMPLER)
            model.load_adapter(name.place(self._checkpoints), SAMPLER, is_trainable=False)
            self._learner.opened.split.adapters_changed()
            self._loaded = name
        return SAMPLER

    def forget(self, name: CheckpointName) -> None:
        """Read a checkpoint anew when it is asked for again, because it has changed."""
        if name == self._loaded:
            self._loaded = None
            model: Any = self._learner.model
            model.delete_adapter(SAMPLER)

    def sample(
        self, name: CheckpointName | None, prompt: Sequence[int], count: int, asked: SamplingParams
    ) -> list[SampledText]:
        """Return texts that follow a prompt."""
        learner = self._learner
        adapter = self._adapter(name)
        model: Any = learner.model
        ids = torch.tensor([[*prompt]] * count, device=learner.opened.backend.device)
        stops = asked.stop
        eos = [] if stops == [] else _ends(learner)
        options: dict[str, Any] = {
            "max_new_tokens": asked.max_tokens or MOST_TOKENS,
            "do_sample": asked.temperature > 0,
            "return_dict_in_generate": True,
            "output_logits": True,
            "pad_token_id": eos[0] if eos else 0,
            "attention_mask": torch.ones_like(ids),
        }
        if asked.temperature > 0:
            options |= {
                "temperature": asked.temperature,
                "top_p": asked.top_p,
                "top_k": max(0, asked.top_k),
            }
        if isinstance(stops, str):
            stops = [stops]
        if stops and isinstance(stops[0], int):
            eos = [*eos, *(stop for stop in stops if isinstance(stop, int))]
        elif stops:
            options |= {"stop_strings": stops, "tokenizer": learner.opened.tokenizer}
        options["eos_token_id"] = eos or None
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            # because the fork begins with the same state each time
            seed = secrets.randbits(63) if asked.seed is None else asked.seed
            torch.manual_seed(seed % 2**63)
            with computing_with(adapter, [learner.opened.skeleton]):
                made = model.generate(input_ids=ids, **options)
        logprobs = torch.stack(made.logits, dim=1).float().log_softmax(-1)
        new = made.sequences[:, ids.shape[1] :]
        picked = logprobs.gather(-1, new[:, :, None])[:, :, 0]
        texts = []
        for row in range(count):
            tokens = new[row].tolist()
            ends = [place for place, token in enumerate(tokens) if token in eos]
            size = ends[0] + 1 if ends else len(tokens)
            stopped = bool(ends) or size < options["max_new_tokens"]
            texts.append(SampledText(tokens[:size], picked[row, :size].tolist(), stopped))
        return texts

    def prompt_logprobs(self, name: CheckpointName | None, prompt: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt, NaN for the first."""
        ids = torch.tensor([*prompt])
        if len(ids) < 2:
            return [float("nan")] * len(ids)
        rows = AdapterRows(self._adapter(name), [Datum(ids[:-1], ids[1:])], "cross_entropy")
        (scored,) = self._learner.run([rows], differentiate=False)
        return [float("nan"), *scored.logprobs[0].tolist()]


def _ends(learner: Learner) -> list[int]:
    """Return the tokens that end a text."""
    ends = getattr(learner.opened.skeleton.generation_config, "eos_token_id", None)
    if ends is None:
        ends = learner.opened.tokenizer.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
