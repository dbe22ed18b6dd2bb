"""What a run of `transformers.Trainer` has besides: noise, smoothed labels, a first adapter,
samples, an upload.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from peft import PeftModel
from smallrun import (
    adapter_of,
    logged,
    momentum,
    opened,
    peft_adapter,
    run_fit,
    same,
    settings,
    token_rows,
    whole_model,
)
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from lema import LemaConfig, LemaModel
from lema.data import collate
from lema.errors import AdapterError, ConfigError, DataError
from lema.train.checkpoint import card as cards
from lema.train.evaluate import evaluate, passes_of_rows
from lema.train.events import report_callbacks, training_arguments


@pytest.fixture(scope="module")
def adapter(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapter(llama, tmp_path_factory.mktemp("adapter"))


# no padding: every row has nine tokens
ROWS = [row for row in token_rows(40) if len(row["input_ids"]) == 9][:8]


class SameState(TrainerCallback):
    """Has every step begin with the same state of the generator; the trainer's loader of data
    draws from it, too.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step)


def by_trainer(
    model: Path, adapter: Path, out: Path, **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the adapter of `transformers.Trainer` over the whole model, which begins
    with this adapter.
    """
    whole = whole_model(model)
    trained = PeftModel.from_pretrained(whole, str(adapter), is_trainable=True)
    optimizer = momentum([one for one in trained.parameters() if one.requires_grad])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        trainer = Trainer(
            trained,
            TrainingArguments(
                output_dir=str(out),
                remove_unused_columns=False,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
                per_device_train_batch_size=2,
                max_steps=4,
                logging_steps=1,
                max_grad_norm=0.0,
                save_strategy="no",
                logging_nan_inf_filter=False,
                train_sampling_strategy="sequential",
                **arguments,
            ),
            data_collator=lambda batch: dict(collate(batch)),
            train_dataset=ROWS,
            optimizers=(optimizer, schedule),
            callbacks=[SameState()],
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, adapter_of(trained)


def by_us(config: LemaConfig) -> tuple[list[float], dict[str, Tensor]]:
    model = LemaModel(config)
    try:
        model.initialize_lora()
        model.get_trainer(momentum(model.get_trainable_parameters()), [SameState()]).fit(ROWS)
        return list(logged(config).values()), adapter_of(model.skeleton)
    finally:
        model.close()


def config_of(llama: Path, adapter: Path, out: Path, **changes: Any) -> LemaConfig:
    """The settings that `by_trainer` has; those of the adapter are its own."""
    plain = settings(llama, out).model_dump(
        exclude_unset=True, exclude={"model_name_or_path", "lora_rank", "lora_alpha"}
    )
    given = {"shuffle": False, "max_steps": 4, "batch_size": 2, "lr_scheduler_type": "constant"}
    given |= {"max_grad_norm": None}
    return LemaConfig(
        str(llama), **plain | given | {"adapter_name_or_path": str(adapter)} | changes
    )


@pytest.mark.parametrize("embeddings", ["auto", "disk"])
def test_noise_is_drawn_as_the_trainer_draws_it(
    llama: Path, adapter: Path, tmp_path: Path, embeddings: str
) -> None:
    config = config_of(
        llama, adapter, tmp_path / "ours", neftune_noise_alpha=5.0, embeddings=embeddings
    )
    losses, found = by_us(config)
    expected, theirs = by_trainer(llama, adapter, tmp_path / "theirs", neftune_noise_alpha=5.0)
    assert losses == expected
    assert same(found, theirs)
    quiet, _ = by_us(config_of(llama, adapter, tmp_path / "quiet"))
    assert quiet != losses and quiet == by_trainer(llama, adapter, tmp_path / "silent")[0]


def test_noise_is_not_in_evaluations_nor_in_what_is_generated(llama: Path, tmp_path: Path) -> None:
    rows = token_rows(3)
    found = []
    for alpha in (None, 50.0):
        with opened(settings(llama, tmp_path, neftune_noise_alpha=alpha)) as model:
            trainer = model.get_trainer()
            trainer.ready()
            measured = evaluate(
                model.adapter, passes_of_rows(rows, model.config, model.backend.replicas)
            )
            found.append((measured["eval_loss"], model.generate("the miller", 4)))
    assert found[0] == found[1]


def test_noise_is_refused_where_it_would_be_another(llama: Path, tmp_path: Path) -> None:
    for other in ({"cache_frozen_prefix": True, "shuffle": False}, {"sequence_parallel": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(other))}.* other noise"):
            settings(llama, tmp_path, neftune_noise_alpha=5.0, **other)


def test_labels_are_smoothed_as_the_trainer_smooths_them(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    config = config_of(llama, adapter, tmp_path / "ours", label_smoothing_factor=0.2)
    losses, _ = by_us(config)
    expected, _ = by_trainer(llama, adapter, tmp_path / "theirs", label_smoothing_factor=0.2)
    assert losses == pytest.approx(expected, rel=1e-5)
    with opened(
        settings(llama, tmp_path / "eval", label_smoothing_factor=0.2, loss_chunk_tokens=4)
    ) as model:
        batch = collate(token_rows(3))
        measured = model.get_trainer().evaluate(token_rows(3))["eval_loss"]
        logits: list[Tensor] = []
        model.adapter.evaluate([dict(batch)], logits)  # type: ignore[list-item]
        smoothed = LabelSmoother(0.2)({"logits": logits[0]}, batch["labels"], shift_labels=True)
    assert measured == pytest.approx(float(smoothed), rel=1e-5)


def test_labels_are_not_smoothed_beside_other_losses(llama: Path, tmp_path: Path) -> None:
    for other in ({"loss_type": "dft"}, {"objective": "dpo"}, {"head": "stream"}):
        with pytest.raises(ConfigError, match="smoothing"):
            settings(llama, tmp_path, label_smoothing_factor=0.1, **other)


@pytest.mark.filterwarnings("ignore:this run may learn nothing")
def test_a_run_begins_with_a_saved_adapter_as_it_is(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    config = config_of(llama, adapter, tmp_path / "out", save_steps=2, lora_dropout=0.25)
    with_nothing_learnt = config.model_copy(
        update={"learning_rate": 0.0, "output_dir": str(tmp_path / "same")}
    )
    model = LemaModel(with_nothing_learnt)
    model.initialize_lora()
    assert (model.config.lora_rank, model.lora_manager.peft_config["default"].lora_dropout) == (
        3,
        0.25,
    )  # type: ignore[union-attr]
    assert same(adapter_of(model.skeleton), adapter_of(whole_model(llama, adapter)))
    model.close()
    losses, straight = by_us(config)
    # The adapter may be gone when the result is opened, and it has moved on.
    gone = LemaModel.from_pretrained(
        tmp_path / "out", adapter_name_or_path=str(tmp_path / "nowhere")
    )
    assert same(adapter_of(gone.skeleton), straight)
    gone.close()
    assert losses[0] != losses[-1]
    for change, error, words in [
        ({"lora_rank": 5}, ConfigError, "lora_rank is 5, but the adapter was made with 3"),
        ({"adapter_name_or_path": str(llama)}, AdapterError, "no adapter in PEFT's format"),
    ]:
        with pytest.raises(error, match=words):
            LemaModel(config_of(llama, adapter, tmp_path / "other", **change))


def test_reports_are_named_none_and_all_as_transformers_names_them(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings(llama, tmp_path, report_to="none").report_to == []
    assert report_callbacks(settings(llama, tmp_path, report_to=["none"])) == []
    monkeypatch.setattr(
        "lema.train.events.get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    every = settings(llama, tmp_path, report_to="all")
    assert [type(one).__name__ for one in report_callbacks(every)] == ["TensorBoardCallback"]
    assert training_arguments(every, evaluates=False).report_to == ["tensorboard"]


def test_prompts_are_continued_after_each_evaluation(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(name: str, prompts: Any) -> LemaConfig:
        given = {"eval_steps": 1, "max_steps": 3, "lora_dropout": 0.1, "save_steps": 1}
        return settings(
            llama, tmp_path / name, eval_prompts=prompts, eval_prompts_max_new_tokens=4, **given
        )

    rows = token_rows(12)
    held_out = token_rows(2, seed=2)
    texts = ["the miller", "corn by the river"]
    _, without = run_fit(config("without", None), rows, held_out)
    (tmp_path / "prompts.txt").write_text("\n".join(texts) + "\n")
    with opened(config("with", str(tmp_path / "prompts.txt"))) as model:
        model.get_trainer().fit(rows, held_out)
        assert same(adapter_of(model.skeleton), without)  # nothing was drawn
        last = model.generate(texts, 4, do_sample=False)
    file = tmp_path / "with" / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, text) for step in (1, 2, 3) for text in texts
    ]
    assert [line["completion"] for line in lines[-2:]] == last
    assert f"sample 1 at step 3: {last[0]!r}" in capsys.readouterr().out
    # Steps that are taken again leave their texts once.
    for step in (2, 3):
        for one in (tmp_path / "with" / f"checkpoint-{step}").iterdir():
            one.unlink()
        (tmp_path / "with" / f"checkpoint-{step}").rmdir()
    run_fit(config("with", texts), rows, held_out, resume=True)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    with pytest.raises(DataError, match="empty"):
        run_fit(config("other", [" "]), rows, held_out)


UNREACHED = {"create": OfflineModeIsEnabled("offline"), "connect": cards.HTTPError("offline")}


class Hub:
    """Stands for `huggingface_hub.HfApi`: notes what is asked of it."""

    endpoint = "https://hub.test"

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.asked = list[Any]()
        self.sent = set[str]()

    def __call__(self) -> "Hub":
        return self

    def create_repo(self, name: str, **options: Any) -> Any:
        self.asked.append(("create", name, options))
        if self.fails in UNREACHED:
            raise UNREACHED[self.fails]
        return type("Made", (), {"repo_id": f"me/{name}" if "/" not in name else name})

    def upload_folder(self, *, folder_path: str, allow_patterns: list[str], **options: Any) -> None:
        if self.fails == "upload":
            raise OSError("gone")
        self.asked.append(("upload", options["repo_id"]))
        paths = [
            str(one.relative_to(folder_path))
            for one in Path(folder_path).rglob("*")
            if one.is_file()
        ]
        self.sent = set(
            huggingface_hub.utils.filter_repo_objects(paths, allow_patterns=allow_patterns)
        )


def test_an_adapter_is_uploaded_with_its_card_and_tokenizer_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr(cards, "HfApi", hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    lines: list[str] = []
    given = {"push_to_hub": True, "hub_private_repo": True, "max_steps": 2, "save_steps": 1}
    run_fit(settings(llama, tmp_path / "mine", **given), token_rows(8), say=lines.append)
    assert hub.asked == [("create", "mine", {"private": True, "exist_ok": True})] * 2 + [
        ("upload", "me/mine")
    ]
    assert lines[-1] == "uploaded: https://hub.test/me/mine"
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
        "tokenizer.json",
    } <= hub.sent
    assert not [
        name for name in hub.sent if "/" in name or "metrics" in name or "lema_config" in name
    ]
    assert not [
        one for one in tmp_path.rglob("*") if one.is_file() and b"hf_secret" in one.read_bytes()
    ]
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "base_model" not in card  # a directory of this machine is none that the hub knows


@pytest.mark.parametrize("why", UNREACHED)
def test_a_hub_that_takes_nothing_is_known_before_the_first_step(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    config = settings(llama, tmp_path / "out", push_to_hub=True, hub_model_id="me/it", max_steps=1)
    monkeypatch.setattr(cards, "HfApi", Hub(why))
    with pytest.raises(ConfigError, match="the hub refused the adapter: offline"):
        run_fit(config, token_rows(4))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    monkeypatch.setattr(cards, "HfApi", Hub("upload"))
    with pytest.raises(ConfigError, match="the adapter was not uploaded: gone") as caught:
        run_fit(config, token_rows(4))
    assert (
        "hf upload me/it" in caught.value.how
        and (tmp_path / "out" / "adapter_model.safetensors").exists()
    )


def test_a_bar_is_shown_where_somebody_looks(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for disabled, there in ((False, True), (True, False)):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        run_fit(
            settings(llama, tmp_path / str(disabled), max_steps=2, disable_tqdm=disabled),
            token_rows(8),
        )
        out, err = capsys.readouterr()
        assert ("2/2" in err) is there
        assert ("'loss': " in out and "bytes_read" not in out) is there


@torch.compiler.set_stance("force_eager")
@pytest.mark.filterwarnings("ignore")
# torchao's, and bitsandbytes' with shared tables
@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "lion_8bit"])
def test_a_run_with_quantised_moments_goes_on_from_its_checkpoint_to_the_bit(
    optim: str, llama: Path, tmp_path: Path
) -> None:
    given = {"optim": optim, "lora_rank": 128, "save_steps": 2, "lr_scheduler_type": "constant"}
    found = []
    for name, stops in (("straight", [4]), ("resumed", [2, 4])):
        for stop in stops:
            config = settings(llama, tmp_path / name, max_steps=stop, batch_size=4, **given)
            with opened(config) as model:
                model.get_trainer().fit(ROWS, resume=stop > stops[0])
                found.append(adapter_of(model.skeleton))
    assert max(one.numel() for one in found[0].values()) >= 4096  # what torchao quantises
    assert same(found[0], found[2])
    assert not same(found[0], found[1])
