"""Preference losses of a divided model whose reference is the adapter that training began with.

`main` runs on every rank, and the first writes what they found; run alone on the CPU, `steps` is
what it is held to.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from dividedwork import MODELS, SHAPE
from preferences import batch_of, examples, parts_of
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.model.partition import layout_of, whole_tensor
from lema.train.steps import no_event

STEPS = 2
OBJECTIVES = ("dpo", "kto")
SEQUENCE = (False, True)


def write_model(directory: Path) -> None:
    """Write a model, and an adapter that has learnt something."""
    torch.manual_seed(3)
    kind, changes = MODELS["llama, 2 kv"]
    vocabulary = {"vocab_size": 97}  # which two processes do not divide evenly
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SHAPE, **changes, **vocabulary})
    )
    model.save_pretrained(directory / "model")
    with closing(
        LemaModel(LemaConfig(str(directory / "model"), device="cpu", lora_rank=4))
    ) as opened:
        opened.initialize_lora()
        with torch.no_grad():
            for one in opened.get_trainable_parameters():
                one.add_(torch.randn(one.shape), alpha=0.05)
        opened.save_pretrained(directory / "adapter")


def steps(
    directory: Path, objective: str, saved: Path | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Take some steps from the adapter on; return losses, the first step's gradients and the
    adapter, whole.

    `saved`: where to leave a checkpoint before the last step, which is taken by a model that goes
    on from it.
    """
    given: dict[str, Any] = {
        "adapter_name_or_path": str(directory / "adapter"),
        "objective": objective,
    }
    given |= {
        "output_dir": str(directory / "out"),
        "learning_rate": 1e-2,
        "gradient_checkpointing": True,
    }
    given |= {"max_grad_norm": 0.5, "save_steps": 0, "adam_epsilon": 1e-3}
    config = LemaConfig(str(directory / "model"), **given | settings)
    rows = parts_of(batch_of(examples(labelled=objective == "kto")), 4, 4)
    found = dict[str, Tensor]()
    losses = list[float]()
    for step in range(STEPS):
        with closing(LemaModel(config)) as model:
            model.initialize_lora()
            parallel = model.backend.parallel
            trainer = model.get_trainer()

            def note(event: str, model: LemaModel = model, parallel: Any = parallel) -> None:
                if event == "on_pre_optimizer_step":
                    for name, one in model.lora_manager.named_parameters():
                        if one.grad is not None:
                            found[f"gradient {name}"] = whole_tensor(
                                parallel, one.grad, layout_of(one)
                            ).clone()

            if step:
                assert saved is not None
                trainer.load_checkpoint(saved)
            losses.append(trainer.accumulate(rows, on_event=no_event if step else note).loss)
            if step == 0 and saved is not None:
                trainer.save_checkpoint(saved)
            for name, one in model.lora_manager.named_parameters():
                if one.requires_grad:
                    found[f"after {name}"] = whole_tensor(
                        parallel, one.detach(), layout_of(one)
                    ).clone()
    return found | {"losses": torch.tensor(losses)}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for objective in OBJECTIVES:
        for sequence in SEQUENCE:
            shared = {
                "device": "neuron",
                "neuron_runtime": "emulated",
                "sequence_parallel": sequence,
            }
            name = f"{objective} {sequence}"
            found = steps(directory, objective, directory / f"saved {name}", **shared)
            if torch.distributed.get_rank() == 0:
                save_file(
                    {key: one.contiguous() for key, one in found.items()},
                    directory / f"{name}.safetensors",
                )
    torch.distributed.destroy_process_group()
