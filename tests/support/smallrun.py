"""What a first run is made of: a small model, its tokenizer, rows of tokens, and the whole model
to compare with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from aligned import aligned
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lema import LemaConfig, LemaModel, LemaTrainer
from lema.data import collate
from lema.train.metrics import read_metrics
from lema_cpu import CpuBackend

NUM_LAYERS = 8
VOCABULARY = 300
SENTENCES = [f"the miller of mill {number} grinds corn by the river" for number in range(24)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
LINEAR = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


@cache
def _trained() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return bpe.to_str()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with an end of sequence, no padding token, and a chat
    template.
    """
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token="<eos>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def _config(name: str, **changes: Any) -> PreTrainedConfig:
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 128}
        return GPT2Config(
            **common | sizes | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} | changes
        )
    if name == "mistral":
        changes = {"sliding_window": 6, **changes}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
    }
    make = MistralConfig if name == "mistral" else LlamaConfig
    return make(
        **common | sizes | {"num_key_value_heads": 2, "max_position_embeddings": 128} | changes
    )


def write_model(
    directory: Path, name: str = "llama", *, dtype: torch.dtype | None = None, **changes: Any
) -> Path:
    """Write a random model of the architecture, in shards, with its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():  # what is 0 or 1 everywhere tells no layers apart
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(dtype or torch.float32).save_pretrained(directory, max_shard_size="60KB")
    tokenizer().save_pretrained(directory)
    return directory


def token_rows(count: int, seed: int = 1, length: int = 9) -> list[dict[str, list[int]]]:
    """Draw rows of `length` to `length + 4` tokens, the first two of which are not learnt."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (length + index % 5,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def settings(model: Path, output_dir: Path, **changes: Any) -> LemaConfig:
    """Return the settings of a small run on the CPU, in one chunk of loss."""
    base: dict[str, Any] = {
        "device": "cpu",
        "output_dir": str(output_dir),
        "lora_rank": 4,
        "lora_alpha": 8,
        "learning_rate": 1e-2,
        "gradient_checkpointing": True,
        "device_memory": None,
        "save_steps": 0,
        "batch_size": 4,
    }
    return LemaConfig(str(model), **base | changes)


@contextmanager
def opened(config: LemaConfig, *, adapter: bool = True) -> Iterator[LemaModel]:
    """Open a model on a backend that fills released slots with NaN, with a fresh adapter whose B
    is not zero.
    """
    model = LemaModel(config, backend=CpuBackend(poison=True))
    try:
        if adapter:
            model.initialize_lora()
            draw_b(model.skeleton)
        yield model
    finally:
        model.close()


def draw_b(model: torch.nn.Module) -> None:
    """Give every B, zero at first, small random values, so that the adapter changes what the
    model says.
    """
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=draw)


def adapter_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the adapter's parameters, by name from the decoder layers on."""
    found = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    return {
        name.removeprefix("base_model.model."): parameter.detach().clone()
        for name, parameter in found.items()
    }


def whole_model(
    model: Path, adapter: Path | None = None, **options: Any
) -> PreTrainedModel | PeftModel:
    """Load the whole model, with a saved adapter where one is given, without a line of ours."""
    base = aligned(AutoModelForCausalLM.from_pretrained(model, **options))
    return (base if adapter is None else PeftModel.from_pretrained(base, str(adapter))).eval()


def peft_adapter(model: Path, directory: Path, name: str = "llama", **changes: Any) -> Path:
    """Write an adapter with PEFT alone."""
    config = LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": LINEAR[name], "task_type": "CAUSAL_LM"}
        | ({"fan_in_fan_out": True} if name == "gpt2" else {})
        | changes
    )
    torch.manual_seed(5)
    peft_model = get_peft_model(aligned(AutoModelForCausalLM.from_pretrained(model)), config)
    draw_b(peft_model)
    peft_model.save_pretrained(str(directory))
    return directory


def batch(seed: int, rows: int = 2) -> dict[str, Tensor]:
    """A batch with padding and a part that is not learnt."""
    found = collate(token_rows(rows, seed))
    return {
        "input_ids": found["input_ids"],
        "labels": found["labels"],
        "attention_mask": found["attention_mask"],
    }


def run_fit(
    config: LemaConfig, rows: Any, eval_rows: Any = None, callbacks: Any = (), **options: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run `fit` on a fresh model; return what it returned and the adapter it left."""
    with opened(config) as model:
        result = model.get_trainer(callbacks=callbacks).fit(rows, eval_rows, **options)
        return result, adapter_of(model.skeleton)


def logged(config: LemaConfig, key: str = "loss") -> dict[int, Any]:
    """What metrics.jsonl says of `key`, by step."""
    return {
        row["step"]: row[key]
        for row in read_metrics(Path(config.output_dir) / "metrics.jsonl")
        if key in row
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_steps_as_a_new_one(trainer: LemaTrainer, first_step: dict[str, Tensor]) -> None:
    """The next step is, bit for bit, the first step of a trainer to which nothing has happened."""
    trainer.train_step(batch(1))
    found = adapter_of(trainer.peft_model)
    assert all(torch.equal(found[name], expected) for name, expected in first_step.items())
    assert (trainer.global_step, trainer.accumulation_step) == (1, 0)


def momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def whole_logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return logits


def streamed_logits(model: LemaModel, ids: Tensor, **inputs: Any) -> Tensor:
    logits: list[Tensor] = []
    model.skeleton.eval()
    model.adapter.evaluate([{"input_ids": ids, "labels": ids, **inputs}], logits)
    return torch.cat(logits)
