"""Completions of a server that is handed the adapter alone: `lema.ServedMixin`, beside TRL's own
code for vLLM on a whole model.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from generationserver import generation_server
from test_trl_grpo import REUSED, SAMPLED, RecordedGRPO, RecordedRLOO, rewarded, run, same
from trlruns import adapters, save, streamed_model, trainer_of, whole_model

from lema import ServedMixin
from lema.errors import ConfigError, LemaError
from lema.train.hf.vllmserver import VLLMServer

__all__ = ["rewarded"]

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
OFF = 0.7  # how wrong the server is about its log-probabilities
# A completion of five tokens is less than half as likely to the server as to the learner.
CUTS = {"token": (0.6, 1.3), "sequence": (0.5, 20.0)}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def corrected(mode: str, **arguments: Any) -> dict[str, Any]:
    low, high = CUTS[mode.partition("_")[0]]
    return {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        **arguments,
    }


class ServedGRPO(ServedMixin, RecordedGRPO):
    pass


def served(url: str, **options: Any) -> Any:
    """The trainer with a server, as `trainer_of` makes one."""

    class Served(ServedGRPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, server=url, **{"server_timeout": 60.0, **options}, **kwargs)

    return Served


def of_trl(url: str, place: Path) -> Any:
    """TRL's own trainer, with TRL's own code for vLLM; only the program that it talks with is the
    same stand-in.
    """

    class Generation:
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer
            self.server = VLLMServer(url)
            self.turns = 0

        def sync_weights(self) -> None:
            self.name = f"whole-{self.trainer.state.global_step}"
            self.turns = 0
            self.trainer.model.save_pretrained(place / self.name)
            self.server.load(self.name, place / self.name)

        def generate(self, prompts: Any, num_generations: int, **_: Any) -> Any:
            step = self.trainer.state.global_step
            seeds = random.Random(f"{self.trainer.args.seed} {step} {self.turns}")
            self.turns += 1
            made = []
            for prompt in prompts[::num_generations]:
                sampling = {"max_tokens": 5, "seed": seeds.randrange(2**31)}
                made += self.server.complete(self.name, prompt, num_generations, **sampling)
            logprobs = [[[number] for number in one.logprobs] for one in made]
            return prompts, [one.token_ids for one in made], logprobs, None

    class OfTRL(RecordedGRPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_vllm = True
            self.vllm_mode = "server"
            self._last_loaded_step = -1
            self.vllm_generation = Generation(self)

    return OfTRL


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.filterwarnings("ignore:gradients are accumulated over several batches")
@pytest.mark.parametrize(
    "arguments", [*map(corrected, MODES), corrected("token_truncate", **REUSED)]
)
def test_the_correction_is_trls_own(llama: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    with generation_server(llama, off=OFF) as server:
        expected = run(
            whole_model(llama), tmp_path, trainer=of_trl(server.url, tmp_path), **arguments
        )
    with generation_server(llama, off=OFF) as server:
        model = streamed_model(llama)
        found = run(model, tmp_path, trainer=served(server.url), **arguments)
        assert len(server.loaded) == 1  # the newest
        (left,) = {path.name for path in (tmp_path / "served").iterdir()} & {*server.loaded}
        assert left == server.loaded[0]
    same(found, expected)
    model.close()
    with generation_server(llama, off=OFF) as server:
        model = streamed_model(llama)
        free = {**arguments, "vllm_importance_sampling_correction": False}
        without = run(model, tmp_path / "free", trainer=served(server.url), **free)
        assert without[0] != found[0]
    model.close()


def test_a_step_reads_what_a_step_of_rows_reads(llama: Path, tmp_path: Path) -> None:
    read = []
    for kind in ("sft", "grpo"):
        model = streamed_model(llama, {"strategy": "streaming"})
        with generation_server(llama) as server:
            options = {"trainer": served(server.url)} if kind == "grpo" else {}
            sizes = {"num_generations": 4, "max_completion_length": 5} if kind == "grpo" else {}
            trainer = trainer_of(
                kind,
                model,
                tmp_path,
                max_steps=3,
                per_device_train_batch_size=8,
                **sizes,
                **options,
            )
            trainer.train()
        read.append(model.opened.adapter.stream.counters.bytes_read)
        model.close()
    assert read[0] == read[1] > 0


def test_a_server_that_is_killed_is_waited_for(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with generation_server(llama) as server:
        model = streamed_model(llama)
        expected = run(model, tmp_path / "straight", trainer=served(server.url))
        model.close()
    stopped = threading.Event()
    with generation_server(llama) as first:
        port = first.server_port

        class Killing(served(first.url)):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                if self.state.global_step == 1 and not stopped.is_set():
                    first.shutdown()
                    first.server_close()
                    stopped.set()
                return super().training_step(*args, **kwargs)

        ended = threading.Event()

        def another() -> None:
            stopped.wait()
            time.sleep(2)
            with generation_server(llama, port):
                ended.wait()

        thread = threading.Thread(target=another, daemon=True)
        thread.start()
        model = streamed_model(llama)
        try:
            found = run(model, tmp_path / "killed", trainer=Killing)
        finally:
            ended.set()
            thread.join()
            model.close()
    same(found, expected)
    said = capfd.readouterr().err
    assert f"the server at {first.url} does not answer; waiting for it, at most 60 s" in said
    assert "answers again" in said


def test_a_learner_that_is_killed_goes_on_with_the_same_server(llama: Path, tmp_path: Path) -> None:
    with generation_server(llama) as server:
        model = streamed_model(llama)
        expected = run(model, tmp_path / "straight", trainer=served(server.url))
        model.close()

        class Dies(served(server.url)):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                if self.state.global_step == 3:
                    raise KeyboardInterrupt
                return super().training_step(*args, **kwargs)

        saving = {"save_strategy": "steps", "save_steps": 2}
        model = streamed_model(llama)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "killed", trainer=Dies, **saving)
        model.close()

        class Resumed(served(server.url)):  # type: ignore[misc]
            def train(self) -> Any:
                return super().train(resume_from_checkpoint=True)

        model = streamed_model(llama)
        trainer = trainer_of(
            "grpo",
            model,
            tmp_path / "killed",
            trainer=Resumed,
            **{**SAMPLED, **saving},
        )
        trainer.train()
        # TRL's rows of a batch are in another order then, so their sum is rounded otherwise.
        assert trainer.losses == pytest.approx(expected[0][2:], abs=1e-6)
        for name, one in adapters(model).items():
            torch.testing.assert_close(one, expected[1][name], rtol=0, atol=1e-6)
        mine = [name for name in server.loaded if name.startswith(trainer._policies._prefix)]
        assert len(mine) == 1
        model.close()


def test_what_cannot_be_served_is_refused(llama: Path, tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="its layers do not stream"):
        trainer_of("grpo", whole_model(llama), tmp_path, trainer=served(url), **SAMPLED)
    with pytest.raises(ConfigError, match=r"vLLM .* does not take DoRA"):
        model = streamed_model(llama, use_dora=True)
        trainer_of("grpo", model, tmp_path, trainer=served(url), **SAMPLED)

    class ServedRLOO(ServedMixin, RecordedRLOO):
        pass

    with pytest.raises(ConfigError, match="no GRPOTrainer of TRL"):
        ServedRLOO(streamed_model(llama), server=url)
    model = streamed_model(llama)
    trainer = trainer_of(
        "grpo", model, tmp_path, trainer=served(url, server_timeout=0.5), **SAMPLED
    )
    with pytest.raises(LemaError, match=r"did not answer for 0\.5 s"):
        trainer.train()
    model.close()


DIFFERENCE = "sampling/sampling_logp_difference/max"


def worst_difference(
    model: Any, directory: Path, server: Any, *, replays: bool, **arguments: Any
) -> float:
    """The worst difference between log-probabilities of learner and server in a run."""
    kind = served(server.url, replay_choices=replays)
    sizes = {**SAMPLED, "logging_steps": 1, **arguments}
    trainer = trainer_of("grpo", model, directory, trainer=kind, **sizes)
    trainer.train()
    differences = [entry[DIFFERENCE] for entry in trainer.state.log_history if DIFFERENCE in entry]
    assert len(differences) == SAMPLED["max_steps"]
    # before the first step, learner and reference are one, if both choose the same experts
    assert trainer.state.log_history[0].get("kl", 0.0) == 0.0
    return max(differences)


@pytest.mark.filterwarnings("ignore:gradients are accumulated over several batches")
@pytest.mark.parametrize("arguments", [{}, REUSED, {"beta": 0.1}])
def test_a_learner_takes_the_experts_that_the_server_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any]
) -> None:
    """Replayed, the server's choices give the server's numbers; free ones do not."""
    mixture = save("qwen3_moe", tmp_path / "model")
    worst = {}
    for routes, replays in (("told", True), ("told", False), ("untold", True)):
        with generation_server(mixture, routes=routes) as server:
            model = streamed_model(mixture)
            place = tmp_path / f"{routes}-{replays}"
            worst[routes, replays] = worst_difference(
                model, place, server, replays=replays, **arguments
            )
            model.close()
        said = capsys.readouterr().err
        assert said.count("does not tell which experts it chose") == (routes == "untold")
    assert worst["told", True] < 1e-5
    assert worst["told", False] > 1e-3
    assert worst["untold", True] == worst["told", False]


def test_a_server_that_tells_of_other_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = save("qwen3_moe", tmp_path / "model")
    model = streamed_model(mixture)
    with generation_server(mixture, routes="told") as server:
        whole = type(server).routed_experts
        monkeypatch.setattr(
            type(server), "routed_experts", lambda self, rows: whole(self, rows)[:, 2:]
        )
        with pytest.raises(LemaError, match="tokens before its last"):
            run(model, tmp_path, trainer=served(server.url))
    model.close()
