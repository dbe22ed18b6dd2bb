"""A model that is in no library: its code lies beside its weights, and writes down that it was
imported.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from smallrun import VOCABULARY, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

MARK = """
import os

with open(os.environ["LEMA_TEST_IMPORTED"], "a") as out:
    out.write(__name__.rpartition(".")[2] + "\\n")
"""

CONFIGURATION = """
from transformers import PreTrainedConfig

class MillConfig(PreTrainedConfig):
    model_type = "mill"
    vocab_size: int = 300
    hidden_size: int = 24
    num_hidden_layers: int = 6
    width: int = 40
"""

MODELING = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_mill import MillConfig


class Stone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.grind = nn.Linear(config.hidden_size, config.width)
        self.sift = nn.Linear(config.width, config.hidden_size, bias=False)

    def forward(self, grain, scale):
        before = torch.cumsum(grain, 1) / torch.arange(1, grain.shape[1] + 1)[:, None]
        return grain + scale * self.sift(torch.tanh(self.grind(self.norm(before))))


class MillForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MillConfig

    def __init__(self, config):
        super().__init__(config)
        self.funnel = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stones = nn.ModuleList(Stone(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.sack = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, **kwargs):
        hidden = self.funnel(input_ids)
        for stone in self.stones:
            hidden = stone(hidden, 0.5)
        logits = self.sack(self.norm(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
"""

TOKENIZATION = """
from transformers import PreTrainedTokenizerFast


class MillTokenizer(PreTrainedTokenizerFast):
    pass
"""

CODE = {"configuration_mill.py": MARK + CONFIGURATION, "modeling_mill.py": MARK + MODELING}
AUTO_MAP = {
    "AutoConfig": "configuration_mill.MillConfig",
    "AutoModelForCausalLM": "modeling_mill.MillForCausalLM",
}


class Imports:
    """What of a model's code was imported in this process.

    Args:
        file: what the code writes to.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def modules(self) -> set[str]:
        """The modules imported since the last `forget`."""
        return set(self._file.read_text().split()) if self._file.exists() else set()

    def forget(self) -> None:
        """Take the modules out of the process, so that to use them is to import them again."""
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]
        self._file.unlink(missing_ok=True)


@contextmanager
def imports_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imports]:
    """Keep the copies `transformers` makes of a model's code in `directory`, and see what is
    imported of them.
    """
    modules = directory / "modules"
    monkeypatch.setenv("LEMA_TEST_IMPORTED", str(directory / "imported"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    seen = Imports(directory / "imported")
    seen.forget()
    yield seen
    seen.forget()


def write_own_model(directory: Path) -> Path:
    """Write the model with its code and a tokenizer; its code must be imported for that."""
    directory.mkdir(parents=True)
    for name, text in CODE.items():
        (directory / name).write_text(text)
    (directory / "config.json").write_text(json.dumps({"model_type": "mill", "auto_map": AUTO_MAP}))
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert config.vocab_size == VOCABULARY
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory, max_shard_size="40KB")
    tokenizer().save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def write_own_tokenizer(directory: Path) -> None:
    """Give the tokenizer of a model a class that is in no library."""
    (directory / "tokenization_mill.py").write_text(MARK + TOKENIZATION)
    file = directory / "tokenizer_config.json"
    own = {
        "tokenizer_class": "MillTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_mill.MillTokenizer"]},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | own))


def without_code(model: Path, directory: Path) -> Path:
    """Copy a model, but for its code."""
    return shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.py"))
