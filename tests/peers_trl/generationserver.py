"""A stand-in for a vLLM server, as far as TRL's asynchronous GRPO asks: adapters are handed over
as PEFT's files.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import MethodType
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

__all__ = ["asked", "generation_server"]

ABOUT = {
    "lora_config": {"max_lora_rank": 8, "max_loras": 8},
    "parallel_config": {"data_parallel_size": 1},
    "model_config": {"dtype": "torch.float32"},
}


class _Server(HTTPServer):
    """Has the whole model, and the adapters that it was told of."""

    allow_reuse_address = True

    def __init__(
        self, base: Path, port: int = 0, off: float = 0.0, routes: str | None = None
    ) -> None:
        self.base = base
        self.routes = routes
        self.chosen = []  # by its routers, in the order of calls
        self.off = off  # by how much it is wrong about its log-probabilities
        self.model = None
        self.loaded = []  # names of adapters, in their order
        self.told = []  # every path that was asked for
        super().__init__(("127.0.0.1", port), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, lora_name: str, lora_path: str, **_: Any) -> dict[str, Any]:
        if self.model is None:
            whole = AutoModelForCausalLM.from_pretrained(self.base)
            if self.routes is not None:
                self.route(whole)
            self.model = PeftModel.from_pretrained(whole, lora_path, adapter_name=lora_name)
        else:
            self.model.load_adapter(lora_path, lora_name)
        self.loaded.append(lora_name)
        return {}

    def route(self, whole: Any) -> None:
        """Have the routers of a Qwen3-MoE choose for many tokens other experts than they would,
        and note what they choose.
        """
        for module in whole.modules():
            if type(module).__name__.endswith("Router"):

                def forward(router: Any, hidden: Any) -> Any:
                    logits = torch.nn.functional.linear(hidden, router.weight)
                    odd = torch.arange(logits.shape[-1]) % 2 * logits.std(-1, keepdim=True)
                    chosen = (logits + odd).topk(router.top_k, dim=-1).indices
                    self.chosen.append(chosen)
                    factors = torch.softmax(logits, dim=-1).gather(-1, chosen)
                    if router.norm_topk_prob:
                        factors = factors / factors.sum(dim=-1, keepdim=True)
                    return logits, factors, chosen

                module.forward = MethodType(forward, module)

    def routed_experts(self, rows: int) -> torch.Tensor:
        """Return what routers have chosen since the last call, `[rows, tokens, layers, experts of
        each]`.
        """
        layers = self.model.config.num_hidden_layers
        steps = [
            torch.stack(
                [one.view(rows, -1, one.shape[-1]) for one in self.chosen[at : at + layers]]
            )
            for at in range(0, len(self.chosen), layers)
        ]
        self.chosen = []
        return torch.cat(steps, dim=2).permute(1, 2, 0, 3)

    def unload(self, lora_name: str) -> dict[str, Any]:
        self.loaded.remove(lora_name)
        return {}

    @torch.no_grad()
    def complete(
        self, model: str, prompt: list[int], n: int, max_tokens: int, seed: int, **_: Any
    ) -> dict[str, Any]:
        """Sample `n` completions; a token comes with its log-probability."""
        assert model in self.loaded
        self.model.set_adapter(model)
        self.model.eval()
        self.chosen = []
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = torch.tensor([prompt] * n)
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = made.sequences[:, len(prompt) :]
        logps = (
            torch.stack(made.logits, dim=1)
            .log_softmax(-1)
            .gather(2, tokens.unsqueeze(2))
            .squeeze(2)
        )
        logps = logps + self.off * torch.cos(torch.arange(logps.shape[1]))
        ends = [[*row, 2].index(2) + 1 for row in tokens.tolist()]  # 2 ends a text
        choices = [
            {"index": index, "token_ids": row[:end], "logprobs": {"token_logprobs": of[:end]}}
            for index, (row, of, end) in enumerate(
                zip(tokens.tolist(), logps.tolist(), ends, strict=True)
            )
        ]
        if self.routes == "told":
            for choice, chosen in zip(choices, self.routed_experts(n), strict=True):
                text = io.BytesIO()
                told = chosen[: len(prompt) + len(choice["token_ids"]) - 1]
                np.save(text, told.numpy().astype(np.uint8))
                choice["routed_experts"] = base64.b64encode(text.getvalue()).decode()
        return {"choices": choices}


class _Answers(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, found: dict[str, Any]) -> None:
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.told.append(path)
        models = {"data": [{"id": name} for name in self.server.loaded]}
        answers = {"/health": {}, "/server_info": {"vllm_config": ABOUT}, "/v1/models": models}
        self._answer(answers[path])

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        self.server.told.append(path)
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        doing = {
            "/v1/load_lora_adapter": self.server.load,
            "/v1/unload_lora_adapter": self.server.unload,
            "/v1/completions": self.server.complete,
        }
        self._answer(doing[path](**asked) if path in doing else {})


def asked(url: str, **what: Any) -> Any:
    """Return the answer to a POST."""
    request = Request(url, json.dumps(what).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def generation_server(
    base: Path, port: int = 0, off: float = 0.0, routes: str | None = None
) -> Iterator[_Server]:
    """Run a server of a model's directory while the block runs.

    Args:
        base: the directory.
        port: to listen on; 0: any.
        off: by how much the log-probabilities are wrong that it tells.
        routes: "told": its routers choose otherwise than the model's, and it tells what; "untold":
            it does not tell; None: they choose as the model's.
    """
    with _Server(base, port, off, routes) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
