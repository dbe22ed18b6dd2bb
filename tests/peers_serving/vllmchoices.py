"""Has vLLM run prompts of a mixture of experts, and notes what its routers choose.

    python vllmchoices.py MODEL OUT < rows as JSON

vLLM 0.32 tells choices itself (`--enable-return-routed-experts`), but only with a model runner that
needs Triton, and so a GPU. Here the same function of its routers that it takes them from hands them
to this file.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = ["Capture", "numbers_of"]


class Capture:
    """What vLLM adds to its worker (`worker_extension_cls`)."""

    model_runner: Any

    def begin(self) -> None:
        """Note what routers choose from here on."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.chosen: dict[int, list[torch.Tensor]] = {}
        for module in self.model_runner.model.modules():
            if isinstance(module, MoERunner):
                layer = self.chosen.setdefault(module.layer_id, [])
                module.router.set_capture_fn(partial(_note, layer))

    def end(self) -> list[list[list[int]]]:
        """Return what was chosen since, `[tokens][layers][experts of each]`."""
        layers = [torch.cat(self.chosen[number]) for number in sorted(self.chosen)]
        choices: list[list[list[int]]] = torch.stack(layers, dim=1).tolist()
        return choices


def _note(layer: list[torch.Tensor], choices: torch.Tensor) -> None:
    layer.append(choices.clone())


def numbers_of(model: str, rows: list[list[int]]) -> dict[str, Any]:
    """Return of each row the log-probabilities of its tokens but the first, and the choices for
    all.
    """
    from vllm import LLM, SamplingParams

    server = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=32,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        worker_extension_cls=f"{Path(__file__).stem}.{Capture.__name__}",
    )
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logprobs = []
    choices = []
    for row in rows:
        server.collective_rpc("begin")
        (answer,) = server.generate([{"prompt_token_ids": row}], asked, use_tqdm=False)
        choices.append(server.collective_rpc("end")[0][: len(row)])
        told = answer.prompt_logprobs[1:]
        logprobs.append([by[token].logprob for token, by in zip(row[1:], told, strict=True)])
    return {"logprobs": logprobs, "choices": choices}


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    found = numbers_of(sys.argv[1], json.load(sys.stdin))
    Path(sys.argv[2]).write_text(json.dumps(found))
