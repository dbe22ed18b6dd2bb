"""Runs with an objective of examples: what a user writes, what is logged, and what goes on where
it was stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import lema
from forked import run_program
from ruamel.yaml import YAML
from safetensors.torch import load_file
from smallrun import SENTENCES, adapter_of, logged, opened, settings, whole_model, write_model
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from lema import LemaConfig
from lema.engine.head.objectives import grpo
from lema.errors import ConfigError, NonFiniteError
from lema.train.metrics import read_metrics
from lema.train.run import load_data

OF_PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
PAIRS = [
    {
        "prompt": f"{SENTENCES[at]}.",
        "chosen": " the miller grinds" + " corn" * (at % 3),
        "rejected": " by the river" * (1 + at % 2),
    }
    for at in range(20)
]
LABELLED = [
    {"prompt": f"{SENTENCES[at]}.", "completion": " corn" * (1 + at % 3), "label": at % 2 == 0}
    for at in range(20)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def written(directory: Path, model: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """Write data and a config for `lema train`."""
    directory.mkdir(exist_ok=True)
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model_name_or_path": str(model),
        "device": "cpu",
        "output_dir": str(directory / "out"),
    }
    config |= {
        "train_data": str(data),
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "batch_size": 4,
        "micro_batch_size": 3,
    }
    config |= {"gradient_checkpointing": True, "save_steps": 0, "eval_split": 4, "max_length": 64}
    file = directory / "run.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(config | changes, out)
    return file


@pytest.mark.covered(2)
@pytest.mark.parametrize("objective", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_a_yaml_is_enough(model: Path, objective: str, tmp_path: Path) -> None:
    rows = LABELLED if objective == "kto" else PAIRS
    assert (
        lema("train", written(tmp_path, model, rows, objective=objective, num_train_epochs=3)) == 0
    )
    lines = read_metrics(tmp_path / "out/metrics.jsonl")
    steps, held = ([row for row in lines if key in row] for key in ("loss", "eval_loss"))
    wanted = set(OF_PAIRS) - ({"rewards/accuracies"} if objective == "kto" else set())
    if objective == "kto":  # a batch may have no desirable row, or no other
        steps, held = (
            [{key: value for row in rows for key, value in row.items()}] for rows in (steps, held)
        )
    else:
        assert steps[-1]["loss"] < steps[0]["loss"]
    if objective in ("dpo", "ipo", "kto"):
        wanted |= {"logits/chosen", "logits/rejected"}
    assert all(wanted <= row.keys() for row in steps)
    assert all({f"eval_{name}" for name in wanted} <= row.keys() for row in held)
    assert held[-1]["eval_rewards/margins"] > held[0]["eval_rewards/margins"] or objective == "kto"
    assert held[-1]["eval_examples"] == 4
    assert (tmp_path / "out/adapter_model.safetensors").is_file()


def test_at_first_the_model_is_its_own_reference(model: Path, tmp_path: Path) -> None:
    assert lema("train", written(tmp_path, model, PAIRS, objective="dpo", max_steps=1)) == 0
    (first,) = [row for row in read_metrics(tmp_path / "out/metrics.jsonl") if "loss" in row]
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(0.6931471805599453)


def test_a_line_of_several_steps_has_their_means_also_of_a_run_that_was_stopped(
    model: Path, tmp_path: Path
) -> None:
    class Crash(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    def run(
        name: str, callbacks: Any = (), **options: Any
    ) -> tuple[LemaConfig, dict[str, torch.Tensor]]:
        data = {"objective": "dpo", "train_data": str(tmp_path / "rows.jsonl")}
        config = settings(
            model, tmp_path / name, logging_steps=2, save_steps=1, max_steps=4, **data
        )
        with opened(config) as streamed:
            streamed.get_trainer(callbacks=callbacks).fit(*load_data(streamed), **options)
            return config, adapter_of(streamed.skeleton)

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    straight, whole = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("broken", [Crash()])
    broken, resumed = run("broken", resume=True)
    assert all(torch.equal(one, whole[name]) for name, one in resumed.items())
    for key in ("loss", *OF_PAIRS):
        assert logged(broken, key) == logged(straight, key)
        assert list(logged(straight, key)) == [2, 4]


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_two_processes_train_as_one_does(model: Path, objective: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "objective": objective,
        "adam_epsilon": 1e-2,
        "max_steps": 6,
        "micro_batch_size": 2,
    }
    # The last batch of an epoch has one pair, so that one process has none.
    configs = [written(tmp_path / name, model, PAIRS[:13], **options) for name in ("one", "two")]
    assert lema("train", configs[0]) == 0
    done = run_program(["-m", "lema", "train", str(configs[1])], 2, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = (
        load_file(tmp_path / name / "out/adapter_model.safetensors") for name in ("one", "two")
    )
    assert all(
        float((one[name] - two[name]).norm()) <= 1e-5 * float(one[name].norm()) for name in one
    )
    lines = [read_metrics(tmp_path / name / "out/metrics.jsonl") for name in ("one", "two")]
    for mine, theirs in zip(*lines, strict=True):
        for key in ("loss", "eval_loss", *OF_PAIRS, *(f"eval_{name}" for name in OF_PAIRS)):
            assert (key in mine) == (key in theirs)
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key


@pytest.mark.slow
def test_a_share_of_a_batch_is_too_little_for_the_kl_term(model: Path, tmp_path: Path) -> None:
    config = written(tmp_path, model, LABELLED, objective="kto")
    done = run_program(["-m", "lema", "train", str(config)], 2, tmp_path)
    assert done.returncode != 0
    assert (
        "kto's KL term and aot need a whole batch, but each process has only a share of it"
        in done.stderr
    )


def test_epochs_over_frozen_layers_leave_them_out_for_the_reference_too(
    model: Path, tmp_path: Path
) -> None:
    found = []
    for cached in (False, True):
        options = {
            "cache_frozen_prefix": cached,
            "shuffle": False,
            "num_train_epochs": 2,
            "eval_split": None,
        }
        options |= {"objective": "dpo", "lora_layers_to_transform": [5, 6, 7]}
        directory = tmp_path / str(cached)
        assert lema("train", written(directory, model, PAIRS[:8], **options)) == 0
        rows = [row for row in read_metrics(directory / "out/metrics.jsonl") if "loss" in row]
        found.append(([row["loss"] for row in rows], sum(row["layers_read"] for row in rows)))
    assert found[0][0] == found[1][0]
    assert found[1][1] < found[0][1]


def test_a_loss_that_is_not_finite_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    config = settings(
        model, tmp_path / "out", objective="dpo", train_data=str(tmp_path / "rows.jsonl")
    )
    with opened(config) as streamed:
        with torch.no_grad():
            next(
                one
                for name, one in streamed.skeleton.named_parameters()
                if "layers.5" in name and "lora_B" in name
            ).fill_(float("inf"))
        with pytest.raises(NonFiniteError, match=r"layers\.5"):
            streamed.get_trainer().fit(load_data(streamed)[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.1}, "beta has no effect with objective: sft"),
        ({"objective": "dpo", "simpo_gamma": 1.0}, "simpo_gamma has no effect with objective: dpo"),
        ({"objective": "dpo", "loss_type": "sigmod"}, "did you mean sigmoid"),
        (
            {"objective": "orpo", "loss_type": "sigmoid"},
            "loss_type has no effect with objective: orpo",
        ),
        ({"objective": "dpo", "label_smoothing": 0.1}, "set loss_type to robust or exo_pair"),
        ({"objective": "dpo", "loss_type": "exo_pair"}, "takes the logarithm of label_smoothing"),
        ({"objective": "dpo", "lora_dropout": 0.1}, "trains without dropout"),
        (
            {"objective": "kto", "lora_bias": "all"},
            "compares with the base model, but trained biases cannot be undone",
        ),
        ({"objective": "kto", "batch_size": 1}, "set it to 2 or more"),
        ({"objective": "kto", "cache_frozen_prefix": True, "shuffle": False}, "not cached"),
        ({"loss_type": "dpo"}, "loss_type must be one of nll, dft"),
        ({"objective": "dpp"}, "did you mean dpo"),
    ],
)
def test_settings_that_do_not_go_with_the_objective_are_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        LemaConfig("model", **given)


def test_pairs_are_not_learnt_as_text(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", written(tmp_path, model, PAIRS)) == 3
    assert "set objective: dpo" in capfd.readouterr().err


def test_a_file_of_phases_learns_tokens_alone(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    phases = [{"name": "only", "trains": "lora", "tokens": 512}]
    config = written(tmp_path, model, PAIRS, objective="dpo", phases=phases, eval_split=None)
    assert lema("train", config) == 2
    assert (
        "phases train on the tokens of rows; use a separate run for a preference objective"
        in capfd.readouterr().err
    )


def test_dft_weighs_the_loss_of_each_token_with_its_probability(
    model: Path, tmp_path: Path
) -> None:
    ids = torch.randint(1, 300, (3, 14), generator=torch.Generator().manual_seed(1))
    with opened(settings(model, tmp_path / "out", loss_type="dft", max_grad_norm=None)) as streamed:
        loss = streamed.adapter.loss([{"input_ids": ids, "labels": ids}]).detach()
        streamed.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = whole_model(model, tmp_path / "adapter")(input_ids=ids).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    assert float(loss) == pytest.approx(float((losses * torch.exp(-losses)).mean()), rel=1e-6)


def test_grpo_raises_the_reward_of_what_the_model_says(tmp_path: Path) -> None:
    """Completions drawn from the model itself; a token is worth more the lower its number is."""
    # by which some tokens are likelier than others
    model = write_model(tmp_path / "model", initializer_range=0.3)
    config = settings(model, tmp_path / "out", learning_rate=2e-2, micro_batch_size=16)
    prompt = torch.tensor([5, 6, 7])
    length = 4
    rows = 32
    rewards = []
    with opened(config) as streamed:
        trainer = streamed.get_trainer()
        torch.manual_seed(3)
        streamed.adapter.objective = grpo(beta=0.0, loss_type="grpo")
        for _ in range(9):
            ids = drawn(streamed, prompt.repeat(rows, 1), length)
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            reward = (ids[:, len(prompt) :] < 150).float().mean(1)
            rewards.append(float(reward.mean()))
            advantages = (reward - reward.mean()) / (reward.std() + 1e-4)
            trainer.train_step({"input_ids": ids, "labels": labels, "advantages": advantages})
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4


def drawn(streamed: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Draw tokens from the streamed model, whole rows at a time."""
    objective = streamed.adapter.objective
    streamed.adapter.objective = None
    for _ in range(length):
        logits: list[torch.Tensor] = []
        streamed.adapter.evaluate([{"input_ids": ids, "labels": ids}], logits)
        ids = torch.cat([ids, torch.multinomial(logits[0][:, -1].softmax(-1), 1)], dim=1)
    streamed.adapter.objective = objective
    return ids
