"""What the client of a vLLM server makes of answers that are none of vLLM's."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lema.errors import ConfigError, LemaError
from lema.train.hf.served import MOST_FAILURES, ServedMixin, _Policies
from lema.train.hf.vllmserver import VLLMServer


class Answers(BaseHTTPRequestHandler):
    """Answers a path with a status and a text; None breaks off."""

    paths: dict[str, tuple[int, str] | None]
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.paths.get(self.path, (404, "not here"))
        if answer is None:
            self.close_connection = True
            return
        body = answer[1].encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@pytest.fixture
def server() -> Iterator[Any]:
    kind = type("Own", (Answers,), {"paths": {"/health": (200, "")}, "asked": []})
    with HTTPServer(("127.0.0.1", 0), kind) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{http.server_port}",
            paths=kind.paths,  # type: ignore[attr-defined]
            asked=kind.asked,  # type: ignore[attr-defined]
        )
        http.shutdown()
        thread.join()


def test_errors_say_what_the_server_says_and_how_to_start_it(server: Any, tmp_path: Path) -> None:
    client = VLLMServer(server.url + "/", timeout=1.0)
    client.wait()
    with pytest.raises(ConfigError, match="no server of vLLM") as refused:
        client.names()
    assert "--enable-lora" in str(refused.value.how)
    server.paths["/v1/models"] = (200, json.dumps({"data": [{"id": "base"}, {"id": "mine"}]}))
    assert client.names() == {"base", "mine"}
    with pytest.raises(ConfigError, match="HTTP 404") as refused:
        client.load("mine", tmp_path)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in str(refused.value.how)
    client.unload("mine")
    server.paths["/v1/unload_lora_adapter"] = (500, "no")
    with pytest.raises(ConfigError, match="did not forget"):
        client.unload("mine")
    server.paths["/v1/load_lora_adapter"] = (200, "Success: LoRA adapter added.")
    client.load("mine", tmp_path, stacked=True)
    server.paths["/v1/completions"] = (400, "too long")
    with pytest.raises(ConfigError, match="too long"):
        client.complete("mine", [1, 2], 1, max_tokens=3)
    choices = [
        {"index": 1, "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}},
        {"index": 0, "token_ids": [4], "logprobs": {"token_logprobs": [-0.25]}},
    ]
    server.paths["/v1/completions"] = (200, json.dumps({"choices": choices}))
    assert [made.token_ids for made in client.complete("mine", [1, 2], 2)] == [[4], [5]]


def test_a_server_that_breaks_off_again_and_again_ends_the_run(server: Any) -> None:
    policies = _Policies.__new__(_Policies)
    policies._server = VLLMServer(server.url, timeout=1.0)
    policies._write = lambda: "mine"  # type: ignore[method-assign]
    server.paths["/v1/models"] = (200, json.dumps({"data": [{"id": "mine"}]}))
    server.paths["/v1/completions"] = None
    with pytest.raises(LemaError, match="broke off"):
        policies.complete([([1, 2], 3)], 1, {})
    assert server.asked.count("/v1/completions") == MOST_FAILURES


def test_without_clips_a_ratio_is_left_as_it_is() -> None:
    trainer: Any = SimpleNamespace(
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
        model=SimpleNamespace(training=True),
        _metrics={
            "train": {
                "sampling/sampling_logp_difference/mean": [],
                "sampling/sampling_logp_difference/max": [],
            }
        },
    )
    learner = torch.tensor([[-1.0, -2.0]])
    inputs = {
        "completion_mask": torch.tensor([[1, 1]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, float("nan")]]),
    }
    ratio = ServedMixin._ratio(trainer, learner, inputs)
    assert ratio.tolist() == [[1.0, 1.0]]
