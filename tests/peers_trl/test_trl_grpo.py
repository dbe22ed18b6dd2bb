"""GRPO by TRL: the streamed model makes completions itself, or a server does that is handed the
adapter alone.
"""

from __future__ import annotations

import queue
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from datasets import Dataset
from generationserver import asked, generation_server
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
    vllm_client,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.generation.vllm_generation import VLLMGeneration
from trlruns import (
    KINDS,
    NUM_LAYERS,
    Recorded,
    lora,
    outcome,
    recomputing,
    save,
    streamed_model,
    text,
    tokenizer,
    trainer_of,
    whole_model,
)

from lema import StreamedAsyncMixin, StreamingMixin
from lema.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
PROMPTS = [{"prompt": text(number, 4 + number % 3)} for number in range(12)]
SAMPLED = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 4,
}
MADE: list[Any] = []  # the tokens of every completion that was rewarded


def low_words(completions: list[str], completion_ids: Any = None, **_: Any) -> list[float]:
    """Reward words with low numbers."""
    MADE.append(completion_ids)
    words = [[int(word[1:]) for word in one.split() if word[0] == "w"] for one in completions]
    return [sum(number < 20 for number in one) / max(1, len(one)) for one in words]


class RecordedGRPO(Recorded, GRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, reward_funcs=low_words, **kwargs)


class StreamingGRPO(StreamingMixin, RecordedGRPO):
    pass


class RecordedRLOO(Recorded, RLOOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, reward_funcs=low_words, **kwargs)


GRPO = (RecordedGRPO, GRPOConfig, PROMPTS)


@pytest.fixture(autouse=True)
def rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "grpo", GRPO)
    monkeypatch.setitem(KINDS, "rloo", (RecordedRLOO, RLOOConfig, PROMPTS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


def run(
    model: Any, directory: Path, kind: str = "grpo", trainer: Any = None, **arguments: Any
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Train; return losses, adapter and completions."""
    MADE.clear()
    losses, weights = outcome(
        trainer_of(kind, model, directory, trainer=trainer, **{**SAMPLED, **arguments})
    )
    return losses, weights, list(MADE)


def same(found: Any, expected: Any) -> None:
    """Compare two runs."""
    assert found[2] == expected[2]
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(one, expected[1][name]) for name, one in found[1].items())
    assert len(set(expected[0])) > 2
    assert any(one.abs().sum() > 0 for name, one in expected[1].items() if "lora_B" in name)


# Without more, completions are made for each optimizer step; in the others one batch of them serves
# several.
REUSED = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "beta": 0.1,
}


@pytest.mark.parametrize(
    ("kind", "shape", "arguments"),
    [
        ("grpo", "llama", {}),
        ("grpo", "llama", REUSED),
        ("grpo", "gemma3", {"beta": 0.1}),
        ("rloo", "llama", {}),
    ],
    ids=["llama", "llama_reused_with_reference", "gemma3_with_reference", "rloo"],
)
@pytest.mark.filterwarnings("ignore:gradients are accumulated over several batches")
def test_a_streamed_model_makes_the_completions_losses_and_adapters_of_the_whole_one(
    kind: str, shape: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    directory = save(shape, tmp_path / "model")
    expected = run(whole_model(directory), tmp_path, kind, **arguments)
    model = streamed_model(directory)
    same(run(model, tmp_path, kind, **arguments), expected)
    assert len(expected[2]) == (1 if arguments == REUSED else 4)
    model.close()


@pytest.mark.filterwarnings("ignore:gradients are accumulated over several batches")
def test_the_mixin_joins_batches_whose_completions_are_made_in_the_step(
    llama: Path, tmp_path: Path
) -> None:
    # Completions are made for two batches at once, twice in an optimizer step.
    accumulated = {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "max_steps": 2,
        "beta": 0.1,
    }
    expected = run(whole_model(llama), tmp_path, **accumulated)
    leases = []
    for trainer in (RecordedGRPO, StreamingGRPO):
        model = streamed_model(llama)
        same(run(model, tmp_path, trainer=trainer, **accumulated), expected)
        leases.append(model.opened.memory.counters.leases)
        model.close()
    assert len(expected[2]) == 4
    joined = 2 * (4 - 1) * 2 * NUM_LAYERS
    # With the mixin, what each of two times makes two batches' completions has no reference's pass.
    assert leases[0] - leases[1] == joined + 2 * 2 * 2 * NUM_LAYERS


def test_merged_weights_for_a_server_are_refused(llama: Path) -> None:
    model = streamed_model(llama)
    server: Any = object.__new__(VLLMGeneration)  # its own __init__ needs vLLM
    server.model = model
    server._dist = SimpleNamespace(gather_params=nullcontext)
    with pytest.raises(
        ConfigError,
        match=r"(?s)merging an adapter into weights that are in files.*the adapter's files",
    ):
        next(iter(server._iter_named_params()))
    model.close()


def test_a_server_makes_the_completions_of_adapters_that_it_is_handed(
    llama: Path, tmp_path: Path
) -> None:
    found = []
    for model in (whole_model(llama), streamed_model(llama)):
        with generation_server(llama) as server:

            def rollout(prompts: list[str], trainer: Any, url: str = server.url) -> dict[str, Any]:
                name = f"policy-{trainer.state.global_step}"
                step = trainer.state.global_step
                place = tmp_path / type(trainer.model).__name__ / name
                trainer.accelerator.unwrap_model(trainer.model).save_pretrained(place)
                asked(f"{url}/v1/load_lora_adapter", lora_name=name, lora_path=str(place))
                made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
                for number, prompt in enumerate(prompts):
                    ids = trainer.processing_class(prompt)["input_ids"]
                    more = {"n": 1, "max_tokens": 5, "seed": 100 * step + number}
                    (one,) = asked(f"{url}/v1/completions", model=name, prompt=ids, **more)[
                        "choices"
                    ]
                    made["prompt_ids"].append(ids)
                    made["completion_ids"].append(one["token_ids"])
                    made["logprobs"].append(one["logprobs"]["token_logprobs"])
                return made

            class Served(RecordedGRPO):
                def __init__(self, *args: Any, **kwargs: Any) -> None:
                    super().__init__(*args, rollout_func=rollout, **kwargs)

            found.append(run(model, tmp_path, trainer=Served))
    same(*found)
    model.close()


class Worker:
    """Has a server complete a prompt whenever the policy moves, and two at first, because one
    batch is read ahead.
    """

    def __init__(self, url: str) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self._url = url
        self._version = 0
        self._groups = 0

    def start(self) -> None:
        self._complete()
        self._complete()

    def stop(self) -> None:
        pass

    def check_health(self, _: float) -> None:
        raise AssertionError("the trainer waits for completions that nobody makes")

    def update_model_version(self, version: int) -> None:
        self._version = version
        if version > 1:
            self._complete()

    def _complete(self) -> None:
        ids = tokenizer()(PROMPTS[self._groups]["prompt"])["input_ids"]
        asking = {
            "model": f"trl-policy-v{self._version}",
            "n": 4,
            "max_tokens": 5,
            "seed": self._groups,
        }
        choices = asked(f"{self._url}/v1/completions", prompt=ids, **asking)["choices"]
        made = [one["token_ids"] for one in choices]
        rewards = np.array(
            low_words(tokenizer().batch_decode(made, skip_special_tokens=True), made)
        )
        for choice, of, reward in zip(choices, made, rewards, strict=True):
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array([*ids, *of]),
                completion_mask=np.array([0] * len(ids) + [1] * len(of)),
                old_log_probs=np.array(
                    [0.0] * len(ids) + choice["logprobs"]["token_logprobs"], dtype=np.float32
                ),
                advantage=float((reward - rewards.mean()) / (rewards.std() + 1e-4)),
                model_version=self._version,
                group_id=self._groups,
                metrics={"reward": float(reward)},
            )
            self.rollout_buffer.put(sample)
        self._groups += 1


class RecordedAsync(Recorded, AsyncGRPOTrainer):
    pass


class Streamed(StreamedAsyncMixin, RecordedAsync):
    pass


def attended(
    query: Tensor, key: Tensor, value: Tensor, q: Tensor, k: Tensor, *_: int, **options: Any
) -> Tensor:
    """What FlashAttention 3 computes for segments of queries that end where their keys end, in
    plain torch.
    """
    made = []
    for (at, end), (low, high) in zip(pairwise(q.tolist()), pairwise(k.tolist()), strict=True):
        states = [one.transpose(0, 1) for one in (query[at:end], key[low:high], value[low:high])]
        seen = torch.ones(end - at, high - low, dtype=torch.bool).tril(high - low - (end - at))
        scale = options["softmax_scale"]
        made.append(
            scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=True)
        )
    return torch.cat([one.transpose(0, 1) for one in made])


def test_trls_asynchronous_trainer_hands_the_adapter_alone_to_a_server(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL asks by `requests`, whose functions these are; nothing else here needs it. FlashAttention
    # needs a GPU, and so does the number of operations per second that a device is told to have.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(vllm_client, "is_requests_available", lambda: True)
    monkeypatch.setattr(vllm_client, "requests", httpx2, raising=False)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attended)
    )

    def trained(name: str, model: Any = None) -> Any:
        MADE.clear()
        kind, adapter = (
            (RecordedAsync, {"peft_config": lora()}) if model is None else (Streamed, {})
        )
        with generation_server(llama) as server:
            arguments = AsyncGRPOConfig(
                str(tmp_path / name),
                max_steps=4,
                per_device_train_batch_size=4,
                token_budget=-1,
                max_staleness=1,
                learning_rate=1e-2,
                vllm_server_base_url=server.url,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                **recomputing(True),
            )
            trainer = kind(
                model or str(llama),
                low_words,
                arguments,
                Dataset.from_list(PROMPTS),
                tokenizer(),
                rollout_worker=Worker(server.url),
                **adapter,
            )
            found = outcome(trainer)
        assert server.told.count("/v1/load_lora_adapter") == 5  # at the start and after each step
        assert not any("weight" in path for path in server.told)
        return *found, list(MADE)

    expected = trained("whole")
    model = streamed_model(llama)
    opened = async_grpo_trainer.create_model_from_path
    same(trained("streamed", model), expected)
    assert async_grpo_trainer.create_model_from_path is opened
    assert all(
        one.is_meta
        for name, one in model.named_parameters()
        if ".layers." in name and "lora_" not in name
    )
    model.close()
