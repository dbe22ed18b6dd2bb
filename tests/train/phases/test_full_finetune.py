"""A full fine-tune through a phase of epochs or steps is the run that `transformers.Trainer` makes
of the whole model in memory: every loss, every norm and every weight, bit for bit in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from aligned import aligned
from phaseruns import logged
from tiny import VOCABULARY
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lema import LemaConfig
from lema.data.batches import collate
from lema.train.phases.plan import PhasePlan
from lema.train.phases.rows import ROWS
from lema.train.phases.run import run_phases

if TYPE_CHECKING:
    from tiny import Checkpoint

LENGTHS = (9, 5, 12, 12, 7, 3, 10, 4, 8, 6, 11, 2, 6)
"""Of thirteen rows: the longer of each two is first, so that a batch keeps its order, and the last
batch of an epoch has one."""
BATCH = 2
RATE = 1e-2


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    """Return rows of token ids, of which the first of each is a prompt without labels."""
    generator = torch.Generator().manual_seed(7)
    drawn = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        drawn.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return drawn


class InOrder(Trainer):
    """A Trainer that takes rows in the order of the data, and notes the loss of each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.losses: list[torch.Tensor] = []
        self.norms: list[float] = []

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Return a loader in order. Its generator is its own, because a loader takes a number for
        each epoch, and those of dropout and noise follow.
        """
        rows: Any = self.train_dataset
        return torch.utils.data.DataLoader(
            rows, BATCH, collate_fn=self.data_collator, generator=torch.Generator()
        )

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        if len(self.losses) == self.state.global_step:
            self.losses.append(torch.zeros(()))
        self.losses[-1] = self.losses[-1] + loss
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))
        super().log(logs, *arguments, **options)


def trained_by_trainer(
    checkpoint: Checkpoint, directory: Path, **arguments: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train the whole model in memory; return losses, norms and weights."""
    model = aligned(AutoModelForCausalLM.from_pretrained(checkpoint.published, dtype="float32"))
    fixed: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    trainer = InOrder(
        model,
        TrainingArguments(**{**fixed, **arguments}),
        train_dataset=rows_of(),
        data_collator=lambda rows: dict(collate(rows)),
    )
    trainer.train()
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return [float(loss) for loss in trainer.losses], trainer.norms, weights


def trained_by_phases(
    config: LemaConfig, phase: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train the same with a phase; return losses, norms and weights of the model that it leaves."""
    plan = PhasePlan(
        phases=[{"name": "whole", "trains": "full", "learning_rate": RATE, **phase}],
        batch_size=BATCH,
        seed=config.seed,
    )
    run_phases(config, plan, {ROWS: rows_of()}, say=lambda _: None)
    out = Path(config.output_dir)
    model = AutoModelForCausalLM.from_pretrained(out / "whole" / "model", dtype="float32")
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return logged(out, "loss"), logged(out, "grad_norm"), weights


def assert_same_run(mine: Any, theirs: Any, steps: int) -> None:
    losses, norms, weights = mine
    assert len(losses) == steps
    assert losses == theirs[0]
    assert norms == theirs[1]
    assert weights.keys() == theirs[2].keys()
    assert not [name for name in weights if not torch.equal(weights[name], theirs[2][name])]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "linear": (
        {"num_train_epochs": 1, "weight_decay": 0.1, "warmup_steps": 2},
        {"epochs": 1, "warmup_steps": 2},
        {"weight_decay": 0.1},
        7,
    ),
    "cosine": (
        {"num_train_epochs": 2, "lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        {"epochs": 2, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
        {},
        14,
    ),
    "constant": (
        {"max_steps": 9, "lr_scheduler_type": "constant", "warmup_steps": 3, "max_grad_norm": 0.3},
        {"steps": 9, "lr_scheduler_type": "constant", "warmup_steps": 3},
        {"max_grad_norm": 0.3},
        9,
    ),
    "min-lr": (
        {
            "num_train_epochs": 1,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "max_grad_norm": 0,
        },
        {
            "epochs": 1,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        },
        {"max_grad_norm": None},
        7,
    ),
    "accumulated": (
        {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "weight_decay": 0.01},
        {"epochs": 1},
        {"gradient_accumulation_steps": 2, "weight_decay": 0.01},
        4,
    ),
    "noise": (
        {"num_train_epochs": 1, "neftune_noise_alpha": 5},
        {"epochs": 1},
        {"neftune_noise_alpha": 5},
        7,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_run_of_trainer(
    config_of: Callable[..., LemaConfig],
    checkpoint_of: Callable[..., Checkpoint],
    tmp_path: Path,
    case: str,
) -> None:
    arguments, phase, settings, steps = CASES[case]
    theirs = trained_by_trainer(checkpoint_of("llama"), tmp_path / "trainer", **arguments)
    config = config_of(shuffle=False, save_steps=0, **settings)
    assert_same_run(trained_by_phases(config, phase), theirs, steps)


def test_smoothed_labels_are_those_of_trainer_within_rounding(
    config_of: Callable[..., LemaConfig], checkpoint_of: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """Trainer's label smoother adds up in another order."""
    arguments = {"num_train_epochs": 1, "label_smoothing_factor": 0.1}
    theirs = trained_by_trainer(checkpoint_of("llama"), tmp_path / "trainer", **arguments)
    config = config_of(shuffle=False, save_steps=0, label_smoothing_factor=0.1)
    losses, norms, _ = trained_by_phases(config, {"epochs": 1})
    assert losses == pytest.approx(theirs[0], rel=1e-4)
    assert norms == pytest.approx(theirs[1], rel=1e-3)
    plain, _, _ = trained_by_phases(config_of("plain", shuffle=False, save_steps=0), {"epochs": 1})
    assert losses != pytest.approx(plain, rel=1e-3)
