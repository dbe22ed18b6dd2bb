"""`lema train` with a preference objective against TRL's trainer of it on the whole model, in
fp32, step by step.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from smallrun import adapter_of, opened, settings, tokenizer, write_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from lema.train.metrics import read_metrics
from lema.train.run import load_data

# TRL calls what transformers renamed, and says that some of its trainers are experimental.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 4
PAIRS = 4
# of AdamW, which divides each gradient by its size: by default that magnifies rounding where it is
# small
EPSILON = 1e-3
WORDS = ("the", "miller", "of", "mill", "grinds", "corn", "by", "river", "and", "sells", "it")
NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
OF_LOGITS = ("logits/chosen", "logits/rejected")


def text(start: int, count: int) -> str:
    return " ".join(
        WORDS[(7 * start + 3 * number + start // 3) % len(WORDS)] for number in range(count)
    )


def pairs() -> list[dict[str, str]]:
    """Rows of many lengths, the second of each pair a longer one every other time."""
    return [
        {
            "prompt": text(at, 4 + at % 3),
            "chosen": " " + text(at + 1, 5 + at % 2),
            "rejected": " " + text(at + 5, 4 + at % 4),
        }
        for at in range(16)
    ]


def labelled() -> list[dict[str, Any]]:
    return [
        {
            "prompt": text(at, 4 + at % 3),
            "completion": " " + text(at + 1, 5 + at % 4),
            "label": at % 3 != 1,
        }
        for at in range(16)
    ]


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    **{
        f"dpo-{kind}": (
            DPOTrainer,
            DPOConfig,
            pairs,
            {"objective": "dpo", "loss_type": kind} | more,
            {"loss_type": [kind]} | more,
        )
        for kind, more in {
            "sigmoid": {"beta": 0.3},
            "hinge": {},
            "exo_pair": {"label_smoothing": 0.01},
            "nca_pair": {},
            "robust": {"label_smoothing": 0.2},
            "bco_pair": {},
            "sppo_hard": {},
            "apo_zero": {},
            "apo_down": {},
            "sigmoid_norm": {},
            "aot": {"label_smoothing": 0.2},
            "aot_unpaired": {},
            "discopop": {},
            "sft": {},
        }.items()
    },
    "ipo": (DPOTrainer, DPOConfig, pairs, {"objective": "ipo"}, {"loss_type": ["ipo"]}),
    "orpo": (ORPOTrainer, ORPOConfig, pairs, {"objective": "orpo", "beta": 0.5}, {"beta": 0.5}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        pairs,
        {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1},
        {
            "loss_type": "simpo",
            "beta": 2.0,
            "simpo_gamma": 0.7,
            "label_smoothing": 0.1,
            "cpo_alpha": 0.0,
        },
    ),
    "simpo-cpo": (
        CPOTrainer,
        CPOConfig,
        pairs,
        {"objective": "simpo", "cpo_alpha": 0.5},
        {"loss_type": "simpo", "cpo_alpha": 0.5},
    ),
    "kto": (
        KTOTrainer,
        KTOConfig,
        labelled,
        {"objective": "kto", "desirable_weight": 0.7, "undesirable_weight": 1.4},
        {"desirable_weight": 0.7, "undesirable_weight": 1.4},
    ),
    "kto-pairs": (KTOTrainer, KTOConfig, pairs, {"objective": "kto"}, {}),
    "kto-apo": (
        KTOTrainer,
        KTOConfig,
        labelled,
        {"objective": "kto", "loss_type": "apo_zero_unpaired"},
        {"loss_type": "apo_zero_unpaired"},
    ),
    "dft": (
        SFTTrainer,
        SFTConfig,
        lambda: [{"text": text(at, 9 + at % 4)} for at in range(16)],
        {"loss_type": "dft"},
        {"loss_type": "dft"},
    ),
}


def of_trl(
    case: str, model: Path, adapter: dict[str, torch.Tensor], directory: Path, **more: Any
) -> Any:
    """Train with TRL, from an adapter with these values; return the trainer."""
    make, config, rows, _, options = CASES[case]
    arguments = config(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=PAIRS,
        per_device_eval_batch_size=PAIRS,
        learning_rate=1e-2,
        adam_epsilon=EPSILON,
        lr_scheduler_type="linear",
        optim="adamw_torch",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=STEPS,
        **options,
        **more,
    )
    words = tokenizer()
    words.pad_token = words.eos_token
    data = Dataset.from_list(rows())
    torch.manual_seed(0)
    trainer = make(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(2 * PAIRS)),
        processing_class=words,
        peft_config=LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    found = {
        name.removeprefix("base_model.model."): one
        for name, one in trainer.model.named_parameters()
        if ".lora_" in name
    }
    assert found.keys() == adapter.keys()
    with torch.no_grad():
        for name, one in found.items():
            one.copy_(adapter[name])
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_adapters_are_those_of_trl(
    case: str, accumulation: int, tmp_path: Path
) -> None:
    if accumulation > 1 and case not in ("dpo-sigmoid", "kto", "orpo"):
        pytest.skip("accumulation is the same for all")
    _, _, rows, options, _ = CASES[case]
    model = write_model(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    held = tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    held.write_text("".join(json.dumps(row) + "\n" for row in rows()[: 2 * PAIRS]))
    options = options | {
        "batch_size": PAIRS,
        "micro_batch_size": 3,
        "shuffle": False,
        "max_steps": STEPS,
    }
    options |= {
        "adam_epsilon": EPSILON,
        "train_data": str(data),
        "eval_data": str(held),
        "eval_steps": STEPS,
    }
    config = settings(
        model,
        tmp_path / "out",
        gradient_accumulation_steps=accumulation,
        max_grad_norm=None,
        **options,
    )
    with opened(config) as streamed:
        first = adapter_of(streamed.skeleton)
        streamed.get_trainer().fit(*load_data(streamed))
        last = adapter_of(streamed.skeleton)
    lines = read_metrics(tmp_path / "out/metrics.jsonl")
    trained = of_trl(case, model, first, tmp_path / "trl", gradient_accumulation_steps=accumulation)
    logged = [row for row in trained.state.log_history if "loss" in row]
    steps = [row for row in lines if "loss" in row]
    assert len(steps) == len(logged) == STEPS
    # Of rewards of KTO's rows, TRL takes the mean of the means of batches, which have different
    # numbers of them.
    several = "kto" in case and accumulation > 1
    names = ["loss", "kl", "rewards/margins"] if several else ["loss", "kl", "nll_loss", *NAMES]
    # ORPO's and CPO's are of other tokens
    if not several and case.startswith(("dpo", "ipo", "kto")):
        names += OF_LOGITS
        assert any(name in row for row in logged for name in OF_LOGITS)
    for ours, theirs in zip(steps, logged, strict=True):
        assert_close(ours, theirs, [name for name in names if theirs.get(name)])
    measured = next(row for row in trained.state.log_history if "eval_loss" in row)
    wanted = [*NAMES, *(OF_LOGITS if case.startswith(("dpo", "ipo")) else ())]
    names = ["eval_loss", *(f"eval_{name}" for name in wanted if f"eval_{name}" in measured)]
    if case != "dft" and "kto" not in case:  # of these, TRL takes means of the means of batches
        assert_close(next(row for row in lines if "eval_loss" in row), measured, names)
    theirs = adapter_of(trained.model)
    apart = math.sqrt(
        sum(float((last[name] - one).double().square().sum()) for name, one in theirs.items())
    )
    moved = math.sqrt(
        sum(float((first[name] - one).double().square().sum()) for name, one in theirs.items())
    )
    assert apart < 1e-5 * moved


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], names: list[str]) -> None:
    """Rewards are differences of sums near -40, of which fp32 keeps 4e-6."""
    wrong = {}
    for name in names:
        least = 2e-5 if "/" in name or name == "kl" else 3e-6
        if name not in ours or not math.isclose(
            ours[name], theirs[name], rel_tol=3e-6, abs_tol=least
        ):
            wrong[name] = ours.get(name), theirs[name]
    assert not wrong
