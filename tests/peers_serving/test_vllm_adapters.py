"""A real vLLM on the CPU serves LEMA's adapters: the log-probabilities of prompts are PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servedmodels import DENSE, ROWS, difference, log_probabilities, measured, model_of, trained
from vllmserver import MODULES, VllmServer, vllm_server

from lema.convert.serving.export import export_adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

RANKS: dict[str, dict[str, Any]] = {f"rank{rank}": {"lora_rank": rank} for rank in (8, 16, 64)}
PARTS: dict[str, Any] = {"lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
PATTERNS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_rank_pattern": {"k_proj": 16, "down_proj": 4},
    "lora_alpha_pattern": {"o_proj": 4},
    "lora_use_rslora": True,
}


@dataclass(frozen=True)
class Served:
    """A server with all adapters of a model, and what PEFT makes of them."""

    model_type: str
    server: VllmServer
    base: str  # the name of the model without an adapter
    expected: dict[str, list[list[float]]]  # by the name of an adapter, or of the base


@pytest.fixture(scope="module", params=DENSE)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = model_of(request.param, directory / "model")
    more = {"patterns": PATTERNS, "parts": PARTS} if request.param == "llama" else {}
    adapters = RANKS | more
    expected = {str(model): log_probabilities(model)}
    for number, (name, settings) in enumerate(adapters.items()):
        adapter = trained(model, directory / f"{name}-trained", seed=number, **settings)
        export_adapter(adapter, directory / name, "vllm")
        expected[name] = log_probabilities(model, adapter)
    images = ["--language-model-only"] if request.param == "idefics3" else []
    arguments = [
        f"--model={model}",
        "--enable-lora",
        "--max-lora-rank=64",
        # vLLM 0.32's kernel for the CPU has the last place's adapter answer requests for none, so
        # this stays empty.
        f"--max-loras={len(adapters) + 1}",
        "--lora-target-modules",
        *MODULES,
        "--lora-modules",
        *(f"{name}={directory / name}" for name in adapters),
        *images,
    ]
    with vllm_server(arguments, directory / "log") as server:
        yield Served(request.param, server, str(model), expected)


def test_prompts_have_the_log_probabilities_of_peft(served: Served) -> None:
    without = served.expected[served.base]
    for name, expected in served.expected.items():
        answer = served.server.log_probabilities(name, ROWS)
        label = "no adapter" if name == served.base else name
        measured(f"{served.model_type}, {label}", difference(answer, expected))
        assert name == served.base or difference(without, expected) > 0.1


def test_several_adapters_answer_at_once(served: Served) -> None:
    names = [*served.expected] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: served.server.log_probabilities(name, ROWS), names))
    worst = max(
        difference(answer, served.expected[name])
        for name, answer in zip(names, answers, strict=True)
    )
    measured(f"{served.model_type}, {len(served.expected)} at once", worst)
