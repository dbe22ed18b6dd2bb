"""Runs of a preference objective that begin with an adapter: what they compare with, also when
they go on.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from peft import PeftModel
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from smallrun import SENTENCES, adapter_of, logged, opened, settings, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from lema import LemaConfig, LemaModel
from lema.errors import AdapterError, ConfigError, WeightsError
from lema.train.run import load_data, train

LN2 = math.log(2)
PAIRS = [
    {
        "prompt": f"{SENTENCES[at]}.",
        "chosen": " corn" * (1 + at % 3),
        "rejected": " by the river" * (1 + at % 2),
    }
    for at in range(16)
]

LABELLED = [
    {
        "prompt": pair["prompt"],
        "completion": pair["rejected" if at % 2 else "chosen"],
        "label": at % 2 == 0,
    }
    for at, pair in enumerate(PAIRS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def supervised(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of supervised training with dropout, as most are."""
    out = tmp_path_factory.mktemp("supervised")
    with opened(settings(model, out / "run", lora_dropout=0.05)) as streamed:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for one in streamed.get_trainable_parameters():
                one.add_(torch.randn(one.shape, generator=generator), alpha=0.05)
        streamed.save_pretrained(out / "adapter")
    return out / "adapter"


def config_of(model: Path, adapter: Path, out: Path, **changes: Any) -> LemaConfig:
    rows = out.parent / "rows.jsonl"
    found = LABELLED if changes.get("objective") == "kto" else PAIRS
    rows.write_text("".join(json.dumps(row) + "\n" for row in found))
    # What the adapter says is left to it.
    given = settings(
        model, out, objective="dpo", train_data=str(rows), max_steps=4, save_steps=1, batch_size=4
    )
    own = {
        name: value
        for name, value in given.model_dump(exclude_unset=True).items()
        if not name.startswith("lora_")
    }
    return LemaConfig(
        **own | {"adapter_name_or_path": str(adapter), "learning_rate": 1e-2} | changes
    )


@contextmanager
def begun(config: LemaConfig) -> Iterator[LemaModel]:
    """Open a model with the adapter of its settings, whose values stay."""
    with opened(config, adapter=False) as streamed:
        streamed.initialize_lora()
        yield streamed


def run(config: LemaConfig, callbacks: Any = (), **options: Any) -> dict[str, Tensor]:
    with begun(config) as streamed:
        streamed.get_trainer(callbacks=callbacks).fit(*load_data(streamed), **options)
        return adapter_of(streamed.skeleton)


def tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


class Crash(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_the_first_loss_is_that_of_two_equal_models(
    model: Path, supervised: Path, tmp_path: Path
) -> None:
    config = config_of(model, supervised, tmp_path / "out", max_steps=1)
    run(config)
    assert logged(config, "loss")[1] == pytest.approx(LN2)
    assert logged(config, "rewards/margins")[1] == 0
    other = config_of(model, supervised, tmp_path / "base", max_steps=1, reference="base")
    run(other)
    assert abs(logged(other, "loss")[1] - LN2) > 1e-3


def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped_whatever_became_of_the_adapter(
    model: Path, supervised: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(supervised, start)
    straight = config_of(model, start, tmp_path / "straight", gradient_accumulation_steps=2)
    whole = run(straight)
    broken = config_of(model, start, tmp_path / "broken", gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        run(broken, [Crash()])
    save_file(
        {name: one * 2 for name, one in tensors(start).items()}, start / "adapter_model.safetensors"
    )
    assert same(run(broken, resume=True), whole)
    for key in ("loss", "rewards/chosen", "rewards/margins", "logps/rejected"):
        assert logged(broken, key) == logged(straight, key)
    for place in (tmp_path / "broken", tmp_path / "broken/checkpoint-4"):
        assert same(tensors(place / "ref"), tensors(supervised))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_goes_on_although_the_adapter_that_it_began_with_is_gone(
    objective: str, model: Path, supervised: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(supervised, start)
    changes = {"objective": objective, "save_total_limit": None}
    straight, broken = (
        config_of(model, start, tmp_path / name, **changes) for name in ("straight", "broken")
    )
    for config in (straight, broken):
        train(config)
    shutil.rmtree(start)
    with pytest.raises(WeightsError, match="does not exist"):
        train(straight.model_copy(update={"output_dir": str(tmp_path / "new")}))
    for damaged in (False, True):
        shutil.rmtree(tmp_path / "broken/checkpoint-4")
        (tmp_path / "broken/adapter_model.safetensors").unlink()
        if damaged:  # so it is passed over
            (tmp_path / "broken/checkpoint-3/adapter_model.safetensors").write_bytes(b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which say so
            train(broken, resume=True)
        assert same(tensors(tmp_path / "broken"), tensors(tmp_path / "straight"))
        assert same(tensors(tmp_path / "broken/ref"), tensors(supervised))
        settings = [
            json.loads((tmp_path / name / "lema_config.json").read_text())
            for name in ("straight", "broken")
        ]
        assert settings[1] | {"output_dir": settings[0]["output_dir"]} == settings[0]


def test_the_reference_is_an_adapter_that_peft_opens(
    model: Path, supervised: Path, tmp_path: Path
) -> None:
    run(config_of(model, supervised, tmp_path / "out", max_steps=1))
    whole = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "out")
    )
    whole.load_adapter(str(tmp_path / "out/ref"), adapter_name="ref")
    found = {name: one for name, one in whole.named_parameters() if ".ref." in name}
    expected = tensors(supervised)
    assert len(found) == len(expected)
    assert all(torch.equal(one, expected[name.replace(".ref", "")]) for name, one in found.items())


def test_a_checkpoint_with_another_reference_is_not_gone_on_with(
    model: Path, supervised: Path, tmp_path: Path
) -> None:
    config = config_of(model, supervised, tmp_path / "out", max_steps=2)
    run(config.model_copy(update={"max_steps": 1}))
    with pytest.raises(ConfigError, match="reference: 'adapter' -> 'base'"):
        run(config.model_copy(update={"reference": "base"}), resume=True)
    # A checkpoint from before there was the setting, when the reference was always the base.
    base = config_of(model, supervised, tmp_path / "base", max_steps=2, reference="base")
    with begun(base) as streamed:
        trainer = streamed.get_trainer()
        trainer.save_checkpoint(tmp_path / "older")
    with begun(config) as streamed, pytest.raises(ConfigError, match="set reference: base"):
        streamed.get_trainer().load_checkpoint(tmp_path / "older")


def test_a_result_that_is_opened_again_compares_with_what_its_run_compared_with(
    model: Path, supervised: Path, tmp_path: Path
) -> None:
    config = config_of(model, supervised, tmp_path / "out")
    run(config)
    with begun(config) as streamed:
        rows, _ = load_data(streamed)
    with closing(LemaModel.from_pretrained(tmp_path / "out")) as again:
        measured = again.get_trainer().evaluate(rows)
        again.save_pretrained(tmp_path / "copy")
    assert measured["eval_rewards/margins"] > 1e-3
    with closing(LemaModel.from_pretrained(tmp_path / "copy")) as copy:
        assert copy.get_trainer().evaluate(rows) == measured
    # As a start, without its history, it is what later steps are compared with.
    with begun(config_of(model, tmp_path / "out", tmp_path / "next")) as following:
        assert following.get_trainer().evaluate(rows)["eval_loss"] == pytest.approx(LN2)
    with closing(LemaModel.from_pretrained(supervised, objective="dpo", lora_dropout=0.0)) as first:
        assert first.get_trainer().evaluate(rows)["eval_loss"] == pytest.approx(LN2)
    shutil.rmtree(tmp_path / "copy/ref")
    with closing(LemaModel.from_pretrained(tmp_path / "copy")) as copy:
        copy.generate("the miller", 2)  # which compares with nothing
        with pytest.raises(AdapterError, match="copy the folder ref"):
            copy.get_trainer()


def test_a_run_that_begins_with_the_base_compares_with_it_when_it_is_opened_again(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    data = {"objective": "dpo", "train_data": str(tmp_path / "rows.jsonl"), "learning_rate": 1e-2}
    config = settings(model, tmp_path / "out", max_steps=2, **data)
    run(config)
    assert not (tmp_path / "out/ref").exists()
    with closing(LemaModel.from_pretrained(tmp_path / "out")) as again:
        assert again.config.reference == "base"
        assert again.get_trainer().evaluate(load_data(again)[0])["eval_rewards/margins"] != 0


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("changes", "first"),
    [({"objective": "dpo"}, LN2), ({"objective": "kto", "loss_type": "apo_zero_unpaired"}, 0.5)],
    ids=["dpo", "kto without its KL term"],
)
def test_two_processes_compare_with_the_same_adapter(
    model: Path, supervised: Path, tmp_path: Path, changes: dict[str, Any], first: float
) -> None:
    ends = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        options: dict[str, Any] = {"adam_epsilon": 1e-2, "save_steps": 0}
        config = config_of(model, supervised, tmp_path / name / "out", **changes, **options)
        if name == "one":
            run(config)
        else:
            with (tmp_path / "run.yaml").open("w") as file:
                YAML(typ="safe", pure=True).dump(
                    config.model_dump(mode="json", exclude_unset=True), file
                )
            done = run_program(["-m", "lema", "train", str(tmp_path / "run.yaml")], 2, tmp_path)
            assert done.returncode == 0, done.stderr[-4000:]
            assert "reference: the adapter that the run began with" in done.stdout
        assert logged(config, "loss")[1] == pytest.approx(first)
        assert same(tensors(tmp_path / name / "out/ref"), tensors(supervised))
        ends.append(tensors(tmp_path / name / "out"))
    one, two = ends
    assert all(
        float((one[name] - two[name]).norm()) <= 1e-5 * float(one[name].norm()) for name in one
    )
