"""Texts of a server that was named: it is given adapters as directories, and what it does not take
is refused before it trains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from learnerclient import Client, open_service, serving
from test_learner_server import data
from tiny import Checkpoint

from lema.errors import ConfigError
from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.learner import Learner
from lema_tools.learner.access import Tokens
from lema_tools.learner.sampling import ServedSampler
from lema_tools.learner.service import Limits
from lema_tools.learner.wire import _message

CheckpointOf = Callable[..., Checkpoint]
TEXT = [7, 8, 9]


@contextmanager
def sampling(base: str) -> Iterator[tuple[str, dict[str, Path]]]:
    """Serve what a learner asks of vLLM; gives the URL, and the adapters that were loaded."""
    adapters: dict[str, Path] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            cards = [{"id": name, "parent": base} for name in adapters]
            self._answer({"data": [*cards, {"id": base, "parent": None}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/load_lora_adapter"):
                adapters[asked["lora_name"]] = Path(asked["lora_path"])
                self._answer({})
            elif self.path.endswith("/unload_lora_adapter"):
                del adapters[asked["lora_name"]]
                self._answer({})
            else:
                # the length tells whose text it is
                tokens = TEXT if asked["model"] in adapters else TEXT[:2]
                logprobs = {"token_logprobs": [-1.0] * len(tokens)}
                choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs}
                self._answer({"choices": [choice] * asked["n"]})

        def _answer(self, what: Mapping[str, Any]) -> None:
            body = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", adapters
        server.shutdown()
        thread.join()


@contextmanager
def served(directory: Path, checkpoint: Checkpoint, url: str, limits: Limits) -> Iterator[Client]:
    """Serve a learner with a sampler, as the command opens both."""
    service = open_service(
        directory / "kept",
        checkpoint.streamed,
        server=ServedSampler.at(url),
        settings={"lora_serving": "vllm"},
        limits=limits,
    )
    tokens = Tokens.of(directory / "token")
    with serving(service, tokens) as port:
        yield Client(port, (directory / "token").read_text().split()[1])
    service.learner.close()


def sampled(client: Client, session: str, number: int, **source: str) -> list[int]:
    made = client.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=number, **source
    ).json["sampling_session_id"]
    asked = {
        "prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3},
    }
    answer = client.result(client.post("asample", sampling_session_id=made, seq_id=0, **asked))
    message = _message("SampleResponse").FromString(answer.body)
    tokens: list[int] = np.frombuffer(message.sequences[0].tokens, dtype="<i4").tolist()
    return tokens


def test_a_server_reads_what_is_published_and_samples(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    base = "a-name-longer-than-that-of-any-adapter" * 3
    limits = Limits(rank=8)
    with (
        sampling(base) as (url, adapters),
        served(tmp_path, checkpoint_of("llama"), url, limits) as client,
    ):
        session = client.session()
        model = client.model(session, train_unembed=False)
        client.train(model, 1, data(1))
        client.step(model, 2)
        saved = client.post("save_weights_for_sampler", model_id=model, path="s", seq_id=3)
        path = client.result(saved).json["path"]
        (directory,) = adapters.values()
        assert (directory / "adapter_model.safetensors").is_file()
        assert sampled(client, session, 0, model_path=path) == TEXT
        assert sampled(client, session, 1, base_model="tiny") == TEXT[:2]
        # which one is the base is told by the server, and not by the lengths of names
        assert ServedSampler.at(url).base == base


def test_what_the_server_does_not_take_is_refused_at_creation(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    limits = Limits(rank=1024)
    with (
        sampling("tiny") as (url, _),
        served(tmp_path, checkpoint_of("llama"), url, limits) as client,
    ):
        session = client.session()
        asked = {"session_id": session, "base_model": "tiny"}
        of_head = client.post("create_model", model_seq_id=0, lora_config={"rank": 4}, **asked)
        assert of_head.status == 400
        assert "vLLM 0.32.0 does not take adapters of embeddings and the head" in str(of_head.json)
        lora = {"rank": 600, "train_unembed": False}
        large = client.post("create_model", model_seq_id=1, lora_config=lora, **asked)
        assert large.status == 400
        assert "a rank of 600, of at most 512" in str(large.json)
        assert client.model(session, 2, train_unembed=False)


def test_a_server_may_leave_the_head_out_for_all(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    limits = Limits(rank=8, head=False)
    with (
        sampling("tiny") as (url, _),
        served(tmp_path, checkpoint_of("llama"), url, limits) as client,
    ):
        model = client.model(client.session())
        saved = client.post("save_weights", model_id=model, path="a", seq_id=1)
        info = client.post("weights_info", tinker_path=client.result(saved).json["path"]).json
        assert info["train_attn"]
        assert not info["train_unembed"]


def test_without_a_server_the_head_is_adapted(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama").streamed
    spec = AdapterSpec(4, seed=1)
    plain = Learner.open(checkpoint, device="cpu", longest=64)
    plain.check(spec)
    plain.close()
    learner = Learner.open(checkpoint, device="cpu", longest=64, lora_serving="sglang")
    with pytest.raises(ConfigError, match=r"SGLang .* does not take adapters of embeddings"):
        learner.check(spec)
    learner.close()
