"""Small whole models to offload the activations of, and what a step makes of them."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

NUM_LAYERS = 8
HIDDEN = 32
VOCABULARY = 96
KINDS = ("llama", "gpt2", "mixtral")
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}
TOKENS = (2, 24)  # rows, tokens of each: a hidden state has 6 KiB


def tiny_model(
    kind: str = "llama", *, lora: bool = True, dropout: float = 0.0, dtype: Any = torch.float32
) -> nn.Module:
    """Return a model of eight layers in training mode; only adapters of PEFT train where `lora`
    says so.
    """
    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = GPT2Config(
            vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=NUM_LAYERS, n_head=4, n_positions=64,
            bos_token_id=1, eos_token_id=2, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
        )  # fmt: skip
    else:
        make = {"llama": LlamaConfig, "mixtral": MixtralConfig}[kind]
        config = make(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora:
        targets = TARGETS.get(kind, ["q_proj", "k_proj", "v_proj", "o_proj"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
            settings = LoraConfig(
                r=4, target_modules=targets, init_lora_weights=False, lora_dropout=dropout
            )
            model = get_peft_model(model, settings)
    return model.train()


def checkpointed(model: nn.Module, kind: bool | None) -> nn.Module:
    """Have layers computed again in the backward, by the checkpoint that is reentrant or the
    other; None: by none.
    """
    if kind is not None:
        name = "activation_checkpointing_enable"  # the name that transformers has given it
        enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
        enable({"use_reentrant": kind})
        model.enable_input_require_grads()
    return model


def ids(seed: int = 1, shape: tuple[int, int] = TOKENS) -> Tensor:
    """Return tokens."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor | None = None) -> Tensor:
    """Return the model's own loss."""
    tokens = ids() if tokens is None else tokens
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def step(
    model: nn.Module, context: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take a forward and a backward in a context; return the loss, and every gradient by name."""
    model.zero_grad()
    torch.manual_seed(7)
    with context or nullcontext():
        loss = loss_of(model)
        loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(
    one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Two steps gave one loss and the same gradients, bit for bit; and there are some."""
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name
