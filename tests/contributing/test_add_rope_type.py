"""How to add a rope type: `transformers` registers it, a config names it, and LEMA streams it.

Here are two. The table of `halved` is made once. That of `dynamic_halved` is made anew when a
longer row comes, because `transformers` does so for every type that has "dynamic" in its name, and
LEMA asks for the same word.
"""

from pathlib import Path
from typing import Any

import asloaded
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from uses import by_turns

from lema.model.state.rotary import types_by_length

pytestmark = pytest.mark.filterwarnings("ignore")

FIXED = "halved"
BY_LENGTH = "dynamic_halved"
LENGTHS = [17, 15, 65, 64]  # of rows: around the lengths at which a table may change


def halved(
    config: PreTrainedConfig,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Tensor, float]:
    """Return the frequencies, `[head_dim / 2]`, and the factor of sines and cosines.

    Each frequency is half of the one before. Where a type goes by length, rows that are longer
    than the model's positions turn more slowly; a type without "dynamic" in its name is asked
    once, and not for a length.
    """
    half = config.head_dim // 2
    frequencies = 0.5 ** torch.arange(half, dtype=torch.float32, device=device)
    longest = config.max_position_embeddings
    if seq_len is not None and seq_len > longest:
        frequencies = frequencies * longest / seq_len
    return frequencies, 1.0


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register both types with `transformers`, and give the tests of all types their settings."""
    for kind in (FIXED, BY_LENGTH):
        monkeypatch.setitem(ROPE_INIT_FUNCTIONS, kind, halved)
        monkeypatch.setitem(asloaded.ROPES, kind, {"rope_theta": 10000.0})


def config_of(kind: str) -> PreTrainedConfig:
    """Return a tiny config with this kind of rotary embedding."""
    parameters = {"rope_type": kind, **asloaded.ROPES[kind]}
    return asloaded.llama(
        max_position_embeddings=asloaded.ORIGINAL,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("kind", [FIXED, BY_LENGTH])
def test_a_registered_type_has_the_bits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Evaluations, texts and training steps, by turns, of rows that grow and shrink."""
    model = asloaded.write_model(config_of(kind), tmp_path / "model")
    by_turns(model, LENGTHS, prompts=[asloaded.ORIGINAL - 1, 5])


@pytest.mark.parametrize(("kind", "by_length"), [(FIXED, []), (BY_LENGTH, [BY_LENGTH])])
def test_the_word_in_its_name_says_whether_rows_change_its_table(
    kind: str, by_length: list[str]
) -> None:
    """A resumed run with other micro-batches says so for these types."""
    model = AutoModelForCausalLM.from_config(config_of(kind))
    assert types_by_length(model) == by_length


def test_the_example_is_used(tmp_path: Path) -> None:
    """Another kind of rotary embedding makes other logits of the same weights."""
    logits: list[Any] = []
    for kind in (FIXED, "default"):
        torch.manual_seed(0)
        parameters = {"rope_type": kind, **asloaded.ROPES[kind]}
        model = AutoModelForCausalLM.from_config(asloaded.llama(rope_parameters=parameters))
        (batch,) = asloaded.rows(9)
        logits.append(model(input_ids=batch["input_ids"]).logits)
    assert not torch.equal(*logits)
