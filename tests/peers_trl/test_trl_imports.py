"""Files of `trl sft`, `trl dpo` and `trl kto`, run by TRL's own scripts and, after `lema config
import`, by `lema train`: the same losses and gradient norms at every step.

Both draw the adapter themselves: TRL seeds torch and calls `get_peft_model`, and LEMA draws the same
numbers from the same seed, so no adapter is handed over.

TRL computes log-probabilities with a head of its own, which adds up the vocabulary in tiles, so its
last digits differ (`ROUNDING`). To see that nothing else does, SFT's trainer is also run with the
loss of `transformers`, and then every loss and norm is bitwise LEMA's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from smallrun import write_model
from transformers import Trainer
from trlimports import (
    Steps,
    imported,
    run_by_lema,
    run_by_trl,
    steps_of,
    write_file,
    write_rows,
)

from lema.train import train

# TRL calls what transformers renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROUNDING = 1e-6
ROUNDING_OF_PAIRS = 1e-5  # of losses that are differences of sums over tokens
ROUNDING_OF_HALVES = 5e-3  # of bfloat16, in which TRL's head computes under autocast
WORDS = [
    "the",
    "miller",
    "of",
    "mill",
    "grinds",
    "corn",
    "by",
    "river",
    "and",
    "sells",
    "it",
    "to",
    "people",
    "in",
    "town",
]


def text(start: int, count: int) -> str:
    return " ".join(
        WORDS[(7 * start + 3 * number + start // 3) % len(WORDS)] for number in range(count)
    )


DATA: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": text(at, 4 + at % 6)} for at in range(11)],
    "stories": [{"story": text(at, 4 + at % 6)} for at in range(11)],
    "answers": [
        {"prompt": text(at, 3 + at % 3), "completion": " " + text(at + 1, 3 + at % 4)}
        for at in range(11)
    ],
    "chats": [
        {
            "messages": [
                {"role": "user", "content": text(at, 3)},
                {"role": "assistant", "content": text(at + 2, 3 + at % 3)},
                {"role": "user", "content": text(at + 1, 2)},
                {"role": "assistant", "content": text(at + 3, 2 + at % 4)},
            ]
        }
        for at in range(11)
    ],
    "turns": [
        {
            "prompt": [{"role": "user", "content": text(at, 3)}],
            "completion": [{"role": "assistant", "content": text(at + 2, 3 + at % 3)}],
        }
        for at in range(11)
    ],
    "pairs": [
        {
            "prompt": text(at, 4 + at % 3),
            "chosen": " " + text(at + 1, 5 + at % 2),
            "rejected": " " + text(at + 5, 4 + at % 4),
        }
        for at in range(11)
    ],
    "whole pairs": [
        {
            "chosen": text(at, 4 + at % 3) + " " + text(at + 1, 5 + at % 2),
            "rejected": text(at, 4 + at % 3) + " " + text(at + 5, 4 + at % 4),
        }
        for at in range(11)
    ],
    "chat pairs": [
        {
            "prompt": [{"role": "user", "content": text(at, 3)}],
            "chosen": [{"role": "assistant", "content": text(at + 1, 3 + at % 3)}],
            "rejected": [{"role": "assistant", "content": text(at + 4, 4)}],
        }
        for at in range(11)
    ],
    "labels": [
        {
            "prompt": text(at, 4 + at % 3),
            "completion": " " + text(at + 1, 5 + at % 4),
            "label": at % 3 != 1,
        }
        for at in range(11)
    ],
}
MARKED = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '[end]' }}{% endgeneration %}{% else %}"
    "{{ m.content + '[end]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
COMMON: dict[str, Any] = {
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "bf16": False,
    "max_length": 128,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
}


@dataclass(frozen=True)
class Case:
    """A file of TRL: its data set, and what it has besides `COMMON`."""

    data: str
    values: dict[str, Any] = field(default_factory=dict)
    rounding: float = ROUNDING
    bitwise: bool = True


ONE_BATCH = {"gradient_accumulation_steps": 1}
SFT: dict[str, Case] = {
    "text": Case("texts"),
    "another column": Case("stories", {"dataset_text_field": "story"}),
    "prompt and completion": Case("answers"),
    "prompts trained": Case("answers", {"completion_only_loss": False}),
    "chats": Case("chats"),
    "answers of chats": Case(
        "chats", {"assistant_only_loss": True, "chat_template_path": "marked.jinja"}
    ),
    "turns": Case("turns"),
    "truncated": Case("texts", {"max_length": 12}),
    "prompts that fill a row": Case("answers", {"max_length": 11, "num_train_epochs": 4}),
    "packed": Case("texts", {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}),
    "packs of cut rows": Case(
        "texts",
        {
            "packing": True,
            "max_length": 16,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 3,
        },
    ),
    # TRL lays the packs of a batch in one row, LEMA side by side.
    "packs side by side": Case("texts", {"packing": True, "max_length": 40}, bitwise=False),
    "dropout": Case("texts", {"lora_dropout": 0.3, **ONE_BATCH}),
    "noise": Case("texts", {"neftune_noise_alpha": 5.0}),
    "warmup and cosine": Case("texts", {"warmup_steps": 0.3, "lr_scheduler_type": "cosine"}),
    "warmup of two steps": Case("texts", {"warmup_steps": 2, "num_train_epochs": 1}),
    "least rate": Case(
        "texts",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    ),
    "weight decay": Case("texts", {"weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6}),
    "accumulation over five": Case("texts", {"gradient_accumulation_steps": 5}),
    "two and a half epochs": Case("texts", {"num_train_epochs": 2.5, **ONE_BATCH}),
    "steps": Case("texts", {"max_steps": 7}),
    "seeds": Case("texts", {"seed": 7, "data_seed": 3}),
    "sequential": Case("texts", {"train_sampling_strategy": "sequential"}),
    "clipped": Case("texts", {"max_grad_norm": 0.3}),
    "unclipped": Case("texts", {"max_grad_norm": 0.0}),
    "dora": Case("texts", {"use_dora": True}),
    "rslora": Case("texts", {"use_rslora": True, "lora_target_modules": "all-linear"}),
    "targets": Case("texts", {"lora_target_modules": ["q_proj", "o_proj"]}),
    "a head that trains": Case("texts", {"lora_modules_to_save": ["lm_head"]}),
    "another optimizer": Case("texts", {"optim": "adafactor"}),
    "dft": Case("answers", {"loss_type": "dft"}, bitwise=False),
    "smoothed": Case("texts", {"label_smoothing_factor": 0.1}, bitwise=False),
    "autocast": Case("texts", {"bf16": True}, rounding=ROUNDING_OF_HALVES),
}
PREFERENCES: dict[str, tuple[str, Case]] = {
    **{
        kind: ("dpo", Case("pairs", {"loss_type": kind, **more}))
        for kind, more in {
            "sigmoid": {"beta": 0.3, "lora_dropout": 0.05},
            "hinge": {},
            "ipo": {"beta": 0.2},
            "robust": {"label_smoothing": 0.2},
        }.items()
    },
    "dpo by default": ("dpo", Case("pairs", {"max_length": 30, **ONE_BATCH})),
    "prompts that fill a pair": ("dpo", Case("pairs", {"max_length": 16})),
    "prompts that pairs share": ("dpo", Case("whole pairs")),
    "pairs of chats": ("dpo", Case("chat pairs")),
    "kto": ("kto", Case("labels")),
    "kto of pairs": ("kto", Case("pairs")),
    "kto in batches of three": (
        "kto",
        Case("labels", {"per_device_train_batch_size": 3, "desirable_weight": 0.7}),
    ),
    "kto without kl": ("kto", Case("labels", {"loss_type": "apo_zero_unpaired"})),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a model and a data set of each kind."""
    directory = tmp_path_factory.mktemp("imports")
    write_model(directory / "model", num_hidden_layers=2)
    for name, rows in DATA.items():
        write_rows(directory / name, rows)
    (directory / "marked.jinja").write_text(MARKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(directory / "cache"))
        patch.chdir(directory)
        yield directory


def own_loss(
    self: Trainer,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """The loss of `transformers`, in place of TRL's."""
    return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def runs_of(place: Path, out: Path, kind: str, case: Case) -> tuple[Steps, Steps, Steps]:
    """Return TRL's steps, TRL's with the loss of `transformers`, and LEMA's."""
    values = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / case.data)}
    values |= COMMON | case.values
    file = write_file(out / "trl.yaml", values | {"output_dir": str(out / "trl")})
    theirs = run_by_trl(file, kind)
    bare = run_by_trl(file, kind, loss=own_loss) if case.bitwise and kind == "sft" else theirs
    write_file(file, values | {"output_dir": str(out / "lema")})
    config, translation = imported(file, kind)
    assert not translation.changes
    return theirs, bare, run_by_lema(config)


@pytest.mark.parametrize("name", SFT)
def test_losses_and_norms_of_sft_are_those_of_trl(place: Path, tmp_path: Path, name: str) -> None:
    case = SFT[name]
    theirs, bare, ours = runs_of(place, tmp_path, "sft", case)
    assert len(ours.losses) == len(theirs.losses) >= 3
    assert ours.losses == pytest.approx(theirs.losses, rel=case.rounding)
    assert ours.norms == pytest.approx(theirs.norms, rel=2 * case.rounding)
    if case.bitwise:
        assert ours == bare


@pytest.mark.parametrize("name", PREFERENCES)
def test_losses_and_norms_of_preferences_are_those_of_trl(
    place: Path, tmp_path: Path, name: str
) -> None:
    kind, case = PREFERENCES[name]
    theirs, _, ours = runs_of(place, tmp_path, kind, case)
    assert len(ours.losses) == len(theirs.losses) >= 3
    assert ours.losses == pytest.approx(theirs.losses, rel=ROUNDING_OF_PAIRS)
    assert ours.norms == pytest.approx(theirs.norms, rel=ROUNDING_OF_PAIRS)


def test_a_mixture_is_its_data_sets_one_after_the_other(place: Path, tmp_path: Path) -> None:
    values = {"datasets": [{"path": str(place / "texts")}, {"path": str(place / "more")}]}
    write_rows(place / "more", [{"text": text(at + 30, 6)} for at in range(5)])
    case = Case("", values | {"dataset_name": None})
    theirs, bare, ours = runs_of(place, tmp_path, "sft", case)
    assert len(ours.losses) == len(theirs.losses) == 8
    assert ours == bare


def test_a_run_that_is_resumed_in_an_epoch_goes_on_as_trl_does_without_a_stop(
    place: Path, tmp_path: Path
) -> None:
    """Dropout included: a checkpoint keeps the generator, and a loader draws once an epoch."""
    values = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / "texts")}
    values |= COMMON | ONE_BATCH | {"lora_dropout": 0.2, "lr_scheduler_type": "constant"}
    file = write_file(tmp_path / "trl.yaml", values | {"output_dir": str(tmp_path / "trl")})
    theirs = run_by_trl(file, "sft", loss=own_loss)
    write_file(file, values | {"output_dir": str(tmp_path / "lema")})
    config, _ = imported(file, "sft")
    config.save_steps = 4
    train(config.model_copy(update={"max_steps": 4}))
    train(config, resume=True)
    assert steps_of(config) == theirs
