"""What modules keep from one call to the next is what the whole model keeps, for rows of any
length in any order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asloaded import (
    ORIGINAL,
    ROPES,
    edit_config,
    farthest_from_whole,
    llama,
    opened,
    roped,
    rows,
    write_model,
)
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lema import LemaConfig
from lema.plan.blueprint import draw_up
from lema.plan.inference.keyvalues import text_bytes
from lema.plan.work.workload import MicroBatch, measure

pytestmark = pytest.mark.filterwarnings("ignore")

# Below each threshold, at it, and above it, and then short again.
LENGTHS = (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 9, 40, 20, 70, 65, 64, 63, 12, 20)


def packed(*lengths: int) -> dict[str, Tensor]:
    """Return one row of several texts, whose positions begin anew."""
    (batch,) = rows(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    # The first token of a text does not follow from the text before.
    return batch | {
        "position_ids": positions,
        "labels": batch["labels"].masked_fill(positions == 0, -100),
    }


def alternating() -> Sequence[Sequence[Mapping[str, Tensor]]]:
    """Return steps of a run: each length alone, then several micro-batches of long and short
    rows.
    """
    return [rows(length) for length in LENGTHS] + [rows(40, 9, 70, 12, 20), rows(12, 20)]


def test_every_kind_of_rotary_embedding_is_tested() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(ROPES)


@pytest.mark.parametrize("kind", ROPES)
def test_long_and_short_rows_alternate(kind: str, tmp_path: Path) -> None:
    model = write_model(roped(kind), tmp_path / "model")
    assert farthest_from_whole(model, *alternating()) == 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_packed_texts_go_by_their_longest(kind: str, tmp_path: Path) -> None:
    # with a cache texts are not told apart
    model = write_model(roped(kind, use_cache=False), tmp_path / "model")
    steps = [[packed(9, 12, 5)], [packed(20, 30)], [packed(9, 9), packed(17, 40)], [packed(12, 4)]]
    assert farthest_from_whole(model, *steps) == 0


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"loss_chunk_tokens": 4}], ids=str
)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_alternate_under_other_settings(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(roped(kind), tmp_path / "model")
    # Chunks of the loss round otherwise.
    assert farthest_from_whole(model, *alternating(), **settings) <= (
        1e-5 if "loss_chunk_tokens" in settings else 0
    )


OWN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "ownrope"

class Rotary(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim, self.seen, self.made = dim, 0, {}

    def make(self, length):
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, self.dim, 2).float() / self.dim))
        # The longest row that was seen decides, so that the order of rows matters.
        return torch.outer(torch.arange(length).float(), frequencies / (1 + length / 64))

    def forward(self, x, position_ids):
        length = position_ids.shape[-1]
        if length > self.seen:
            self.seen = length
            KEEP
        angles = self.table[position_ids]
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = Rotary(config.head_dim)
        self.post_init()
"""
KEEP = {
    "attribute": "self.table = self.make(length)",
    "buffer": 'self.register_buffer("table", self.make(length), persistent=False)',
    "in a dictionary": "self.made['table'] = self.make(length); self.table = self.made['table']",
}


def own_model(directory: Path, code: str) -> Path:
    """Write a model whose code lies beside its weights."""
    model = write_model(llama(), directory)
    (model / "own.py").write_text(code)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(model, model_type="ownrope", architectures=["OwnForCausalLM"], auto_map=classes)
    return model


@pytest.mark.parametrize("kept", KEEP)
def test_a_table_that_is_made_by_the_first_call_is_made_of_its_inputs(
    kept: str, tmp_path: Path
) -> None:
    model = own_model(tmp_path / "model", OWN.replace("KEEP", KEEP[kept]))
    steps = [rows(12), rows(30), rows(9, 20), rows(40, 12)]
    assert farthest_from_whole(model, *steps, trust=True) == 0


@pytest.mark.parametrize("kind", ROPES)
def test_a_plan_needs_no_positions_and_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    found = {}
    for name in ("default", kind):
        blueprint = draw_up(
            LemaConfig(str(write_model(roped(name), tmp_path / name)), device="cpu")
        )
        rotary = blueprint.model.model.rotary_emb
        before = dict(vars(rotary)), {buffer: one.clone() for buffer, one in rotary.named_buffers()}
        # Rows shorter and longer than each threshold, which no table makes any dearer.
        works = [
            measure(blueprint.model, blueprint.layers, MicroBatch(1, length), 16).works
            for length in (8, 80)
        ]
        found[name] = works, text_bytes(blueprint.model, blueprint.layers, 60, 20).keys_values
        assert vars(rotary) == before[0]
        assert all(torch.equal(one, before[1][buffer]) for buffer, one in rotary.named_buffers())
    assert found[kind] == found["default"]


def own_table(directory: Path) -> Path:
    return own_model(directory, OWN.replace("KEEP", KEEP["in a dictionary"]))


@pytest.mark.parametrize(
    "make",
    [partial(write_model, roped("dynamic")), own_table],
    ids=["dynamic", "a table of the model's own code"],
)
def test_a_run_that_is_resumed_goes_on_with_what_modules_held(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    first = rows(40)[0]["input_ids"]
    later = rows(20)[0]["input_ids"]

    def losses(*, saved: bool, resumed: bool) -> list[float]:
        with opened(model, trust=True) as streamed:
            trainer = streamed.get_trainer(
                torch.optim.SGD(streamed.get_trainable_parameters(), lr=0.1)
            )
            if resumed:
                trainer.load_checkpoint(tmp_path / "checkpoint-1")
            else:
                trainer.train_step(first)
            if saved:
                trainer.save_checkpoint(tmp_path / "checkpoint-1")
            return [trainer.train_step(later)[1] for _ in range(2)]

    expected = losses(saved=True, resumed=False)
    assert losses(saved=False, resumed=True) == expected
    # Saved once more, with nothing changed by a call since: what was restored is saved as well.
    with opened(model, trust=True) as streamed:
        trainer = streamed.get_trainer(torch.optim.SGD(streamed.get_trainable_parameters(), lr=0.1))
        trainer.load_checkpoint(tmp_path / "checkpoint-1")
        trainer.save_checkpoint(tmp_path / "checkpoint-1")
    assert losses(saved=False, resumed=True) == expected
    state = json.loads((tmp_path / "checkpoint-1" / "state.json").read_text())
    assert "model.rotary_emb" in next(iter(state["generators"]["modules"]))


def test_a_model_that_changes_nothing_adds_nothing_to_a_checkpoint(tmp_path: Path) -> None:
    with opened(write_model(llama(), tmp_path / "model")) as streamed:
        trainer = streamed.get_trainer(torch.optim.SGD(streamed.get_trainable_parameters(), lr=0.1))
        trainer.train_step(rows(9)[0]["input_ids"])
        assert streamed.split.state.saved() == {}
