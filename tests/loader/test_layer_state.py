"""What decoder layers keep from call to call is what those of the whole model keep, or the model is refused by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from asloaded import edit_config, farthest_from_whole, llama, opened, rows, write_model
from torch import Tensor
from transformers import PreTrainedConfig, RecurrentGemmaConfig

from lema.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore")

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

class OwnConfig(LlamaConfig):
    model_type = "ownstate"

class Keeping(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        INIT

    def forward(self, x):
        KEEP
        return super().forward(x * scale)

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Keeping(config)
        WHOLE
        self.post_init()
"""
# What a layer holds at first, and what each call makes of it; `scale` is what the call computes with.
MAKE = "self.mean is None and (delattr(self, 'mean'), self.register_buffer('mean', torch.zeros(()), persistent=False))"
KEPT = {
    "a counter": ("self.count = 0", "self.count += 1; scale = 1 + self.count / 8"),
    "a mean": (
        "self.mean = None",
        "now = x.detach().mean(); self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now;"
        " scale = 1 + self.mean",
    ),
    # A buffer that no file has is not there after `from_pretrained`, unless it is made in a call.
    "a buffer": (
        "self.mean = None",
        "MAKE; self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1); scale = 1 + self.mean",
    ),
    "a buffer that is replaced": (
        "self.mean = None",
        "MAKE; self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(); scale = 1 + self.mean",
    ),
    "a list": ("self.lengths = []", "self.lengths.append(x.shape[1]); scale = 1 + sum(self.lengths) / 256"),
    "a dictionary": (
        "self.seen = {'longest': 0}",
        "self.seen['longest'] = max(self.seen['longest'], x.shape[1]); scale = 1 + self.seen['longest'] / 64",
    ),
    "a view of its input": (
        "self.last = None",
        "scale = 1 + (0 if self.last is None else self.last.mean()); self.last = x.detach()[:, :1]",
    ),
    "a view of a weight": (
        "self.last = None",
        "scale = 1 + (0 if self.last is None else self.last.mean());"
        " self.last = self.up_proj.get_base_layer().weight.detach()[:2] if hasattr(self.up_proj, 'get_base_layer')"
        " else self.up_proj.weight.detach()[:2]",
    ),
    "a table that grows": (
        "self.table = None",
        "self.table = torch.arange(x.shape[1]) / 64 if self.table is None or len(self.table) < x.shape[1] else"
        " self.table; scale = 1 + self.table[-1]",
    ),
}


def keeping(directory: Path, init: str, keep: str, whole: str = "pass", **changes: Any) -> Path:
    """Write a model whose layers keep something from call to call."""
    model = write_model(llama(**changes), directory)
    (model / "own.py").write_text(
        CODE.replace("INIT", init).replace("KEEP", keep).replace("MAKE", MAKE).replace("WHOLE", whole)
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(model, model_type="ownstate", architectures=["OwnForCausalLM"], auto_map=classes)
    return model


def steps() -> Sequence[Sequence[Mapping[str, Tensor]]]:
    """Return steps of one and of several micro-batches, long and short."""
    return [rows(12), rows(20, 9, 40), rows(9, 30), rows(12)]


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_layer_keeps_is_what_it_keeps_in_the_whole_model(kept: str, checkpointing: bool, tmp_path: Path) -> None:
    model = keeping(tmp_path / "model", *KEPT[kept])
    assert farthest_from_whole(model, *steps(), trust=True, gradient_checkpointing=checkpointing) == 0


def test_a_published_type_that_keeps_states_of_recurrences(tmp_path: Path) -> None:
    config = RecurrentGemmaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, lru_width=32,
        attention_window_size=16, head_dim=8, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = write_model(config, tmp_path / "model")
    assert farthest_from_whole(model, *steps()) == 0


COUNTER = KEPT["a counter"]


def refused(model: Path, *batches: Mapping[str, Tensor], **settings: Any) -> str:
    """Return why a step is refused."""
    with opened(model, trust=True, **settings) as streamed, pytest.raises(ModelError) as caught:
        streamed.adapter.loss(batches or rows(12, 20)).backward()
    assert caught.value.where.endswith("model.layers.0") or "model.layers" in caught.value.where
    return caught.value.what


REFUSED = {
    "a module of two layers": (
        (*COUNTER, "self.model.layers[2].mlp = self.model.layers[0].mlp"),
        "a layer keeps Keeping.count from call to call, and shares it with model.layers.2",
    ),
    "a list of all layers": (
        (
            "self.lengths = LENGTHS if 'LENGTHS' in globals() else globals().setdefault('LENGTHS', [])",
            "self.lengths.append(x.shape[1]); scale = 1 + len(self.lengths) / 64",
        ),
        "a layer keeps Keeping.lengths from call to call, and shares it with model.layers.1",
    ),
    "a list that the model has too": (
        (
            "self.lengths = []",
            "self.lengths.append(x.shape[1]); scale = 1",
            "self.lengths = [self.model.layers[0].mlp.lengths]",
        ),
        "and shares it with modules outside of the layers",
    ),
    "a state with its graph": (
        ("self.last = None", "scale = 1 if self.last is None else 1 + self.last; self.last = x.mean()"),
        "a layer keeps Keeping.last from call to call, and differentiates through it",
    ),
    "a write with a graph": (
        (
            "self.last = torch.zeros(())",
            "self.last = torch.zeros(()) if self.last.is_meta else self.last; self.last.copy_(x.mean()); scale = 1",
        ),
        "a layer keeps Keeping.last from call to call, and writes into it with a graph",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_reproduced_is_refused_by_name(case: str, tmp_path: Path) -> None:
    code, why = REFUSED[case]
    assert why in refused(keeping(tmp_path / "model", *code))
