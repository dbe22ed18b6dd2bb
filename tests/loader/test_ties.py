"""Weights are one where `from_pretrained` makes them one: what is stored decides, not what the
config says alone.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from asloaded import (
    edit_config,
    farthest_from_whole,
    llama,
    opened,
    rows,
    store,
    tensors,
    whole,
    write_model,
)
from tinyconfig import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lema
from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare
from lema.model import meta_model, read_config
from lema.model.outer_weights import read_stored
from lema.model.skeleton import auto_class
from lema.model.weight_names import map_names, match_names
from lema.storage import GlobalBinaryIndex

pytestmark = pytest.mark.filterwarnings("ignore")


def head_of_its_own(directory: Path) -> Path:
    """A head beside embeddings with other values, in a checkpoint whose config says that they
    are one.
    """
    model = write_model(llama(), directory)
    edit_config(model, tie_word_embeddings=True)
    return model


def published_with_parts(directory: Path) -> Path:
    """As Mistral-Small-3 is published: the text part says that nothing is tied, and the whole
    says nothing.
    """
    config = tiny_config("mistral3")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = write_model(config, directory)
    edit_config(model, "tie_word_embeddings")
    return model


CASES = {"llama": head_of_its_own, "mistral3": published_with_parts}


def logits_of(directory: Path, ids: Tensor) -> Tensor:
    """Return what a checkpoint gives that `transformers` alone loads."""
    kind = auto_class(transformers.AutoConfig.from_pretrained(directory))
    with torch.no_grad():
        logits: Tensor = kind.from_pretrained(directory).eval()(input_ids=ids).logits
    return logits


@pytest.mark.parametrize(
    ("settings", "within"),
    # in pieces, sums are in another order
    [
        ({}, 0.0),
        ({"embeddings": "disk"}, 0.0),
        ({"head": "stream"}, 1e-5),
    ],
    ids=["whole", "rows", "pieces"],
)
@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_head_that_is_stored_is_used_though_the_config_ties_it(
    make: Callable[[Path], Path], settings: dict[str, str], within: float, tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors(model)}
    assert {"lm_head", "embed_tokens"} <= names
    assert farthest_from_whole(model, rows(12, 9), rows(7), **settings) <= within


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_what_is_written_of_it_keeps_its_head(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    ids = rows(12)[0]["input_ids"]
    with opened(model) as streamed:
        streamed.save_pretrained(str(tmp_path / "adapter"))
        expected = whole(model, streamed).merge_and_unload().eval()(input_ids=ids).logits
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert torch.allclose(logits_of(merged, ids), expected, atol=1e-5)
    name, head = next((name, one) for name, one in tensors(model).items() if "lm_head" in name)
    assert torch.equal(tensors(merged)[name], head)  # under its published name
    prepared = prepare(model, tmp_path / "prepared").path
    assert torch.equal(logits_of(prepared, ids), logits_of(model, ids))
    assert farthest_from_whole(prepared, rows(12)) == 0


def test_another_trainers_forward_uses_it(tmp_path: Path) -> None:
    model = head_of_its_own(tmp_path / "model")
    ids = rows(12)[0]["input_ids"]
    with opened(model) as one:
        one.save_pretrained(str(tmp_path / "adapter"))
        expected = whole(model, one).eval()
    streamed = lema.streamed(str(model), str(tmp_path / "adapter"), device="cpu")
    try:
        with torch.no_grad():
            assert torch.equal(
                streamed.eval()(input_ids=ids).logits, expected(input_ids=ids).logits
            )
            options = {"max_new_tokens": 6, "do_sample": False}
            assert torch.equal(streamed.generate(ids, **options), expected.generate(ids, **options))
    finally:
        streamed.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_the_values_of_the_embeddings_is_one_with_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """It may be stored in another type, as long as the model has the same values for both."""
    model = write_model(llama(tie_word_embeddings=True), tmp_path / "model")
    stored = tensors(model)
    stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].to(dtype).float()
    store(
        model, stored | {"lm_head.weight": stored["model.embed_tokens.weight"].to(dtype, copy=True)}
    )
    skeleton = meta_model(read_config(model))
    map_names(skeleton, GlobalBinaryIndex(model))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert skeleton.all_tied_weights_keys == loaded.all_tied_weights_keys != {}
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert farthest_from_whole(model, rows(12)) == 0


@pytest.mark.parametrize("stored", [("lm_head.weight",), ("model.embed_tokens.weight",)], ids=str)
def test_whichever_is_stored_alone_fills_both(stored: tuple[str], tmp_path: Path) -> None:
    model = write_model(llama(tie_word_embeddings=True), tmp_path / "model")
    held = tensors(model)
    table = held.pop("model.embed_tokens.weight")
    store(model, held | dict.fromkeys(stored, table))
    assert farthest_from_whole(model, rows(12)) == 0


class TwoHeads(LlamaForCausalLM):
    """A model with a second head, as some that predict several tokens have."""

    _tied_weights_keys: ClassVar[dict[str, str]] = dict.fromkeys(
        ("lm_head.weight", "second_head.weight"), "model.embed_tokens.weight"
    )

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.second_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


ONE = ("model.embed_tokens.weight", "lm_head.weight", "second_head.weight")
STORED = [
    stored
    for stored in product(("absent", "equal", "other"), repeat=3)
    if set(stored) != {"absent"}
]


def shared(model: nn.Module) -> list[set[str]]:
    """Return which of the names are one parameter."""
    found: dict[int, set[str]] = {}
    for name in ONE:
        found.setdefault(id(model.get_parameter(name)), set()).add(name)
    return list(found.values())


@pytest.mark.parametrize("stored", STORED, ids=", ".join)
def test_of_three_names_those_are_one_that_transformers_ties(
    stored: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(llama(tie_word_embeddings=True), tmp_path / "model")
    held = tensors(model)
    values = {"equal": held.pop(ONE[0]), "other": torch.ones(96, 32)}
    store(
        model,
        held
        | {
            name: values[how].clone()
            for name, how in zip(ONE, stored, strict=True)
            if how != "absent"
        },
    )
    skeleton = meta_model(read_config(model), kind=TwoHeads)
    index = GlobalBinaryIndex(model)
    records = match_names(skeleton, index)
    loaded = TwoHeads.from_pretrained(model)
    assert shared(skeleton) == shared(loaded)
    assert skeleton.all_tied_weights_keys == loaded.all_tied_weights_keys
    for name in ONE:
        assert torch.equal(read_stored(records[name], torch.float32), loaded.get_parameter(name))


class HeadApart(TwoHeads):
    """A model with a rule of its own for what is tied."""

    def tie_weights(self, *args: Any, **options: Any) -> None:
        self.all_tied_weights_keys.pop("second_head.weight", None)
        super().tie_weights(*args, **options)


def test_a_models_own_rule_for_ties_is_followed(tmp_path: Path) -> None:
    model = write_model(llama(tie_word_embeddings=True), tmp_path / "model")
    held = tensors(model)
    store(model, held | {name: held[ONE[0]].clone() for name in ONE})
    skeleton = meta_model(read_config(model), kind=HeadApart)
    match_names(skeleton, GlobalBinaryIndex(model))
    assert shared(skeleton) == shared(HeadApart.from_pretrained(model)) == [{*ONE[:2]}, {ONE[2]}]
