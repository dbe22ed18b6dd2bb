"""Text from a streamed model is, token for token, what `transformers` makes of the whole model
and its adapter.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import (
    NUM_LAYERS,
    adapter_of,
    opened,
    settings,
    token_rows,
    tokenizer,
    whole_model,
    write_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, MptConfig, StoppingCriteria, StoppingCriteriaList

from lema import LemaModel
from lema.data import collate
from lema.engine import complete
from lema.engine.generation import encoded
from lema.errors import ConfigError, DataError

PROMPTS = ["the miller of", "corn", "the river grinds the mill by the river of corn and"]
NEW = 7


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What `transformers` logs as a warning or worse."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("transformers").addHandler(handler)
    yield found
    logging.getLogger("transformers").removeHandler(handler)


def streamed_tokens(model: LemaModel, prompts: list[str], new: int = NEW, **options: Any) -> Tensor:
    ids = encoded(model.tokenizer, prompts)
    end = model.tokenizer.eos_token_id
    made = complete(
        model.split,
        model.memory,
        model.files.generation_config(),
        model.tokenizer,
        ids,
        new,
        options,
    )
    width = max(len(one.tokens) for one in made)
    return torch.tensor([[*one.tokens, *[end] * (width - len(one.tokens))] for one in made])


def whole_tokens(model: Any, prompts: list[str], new: int = NEW, **options: Any) -> Tensor:
    encode = tokenizer()
    encode.pad_token = encode.eos_token
    inputs = encode(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    defaults = {"do_sample": False, "pad_token_id": encode.pad_token_id, "max_new_tokens": new}
    tokens: Tensor = model.generate(**inputs, **{**defaults, **options})
    return tokens[:, inputs["input_ids"].shape[1] :]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (PROMPTS[:1], {}),
        (PROMPTS, {}),
        (PROMPTS, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40}),
        (PROMPTS, {"num_beams": 3, "repetition_penalty": 1.3}),
    ],
    ids=["one", "three", "sampled", "beams"],
)
def test_tokens_are_those_of_transformers(
    base: Path, prompts: list[str], options: dict[str, Any], tmp_path: Path, complaints: list[str]
) -> None:
    with opened(settings(base, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        torch.manual_seed(5)
        found = streamed_tokens(model, prompts, **options)
        torch.manual_seed(5)
        texts = model.generate(prompts, max_new_tokens=NEW, **options)
    assert complaints == []
    whole = whole_model(base, tmp_path / "adapter")
    bare = whole_model(base)
    torch.manual_seed(5)
    expected = whole_tokens(whole, prompts, **options)
    assert found.shape == (len(prompts), NEW)
    assert torch.equal(found, expected)
    assert texts == tokenizer().batch_decode(expected, skip_special_tokens=True)
    torch.manual_seed(5)
    assert not torch.equal(found, whole_tokens(bare, prompts, **options))  # the adapter has its say


@pytest.mark.parametrize("at", [0, 2])
def test_an_end_that_comes_first_ends_a_text_as_in_transformers(at: int, tmp_path: Path) -> None:
    """Of a model whose attention goes by distances; prompts of three lengths, one of which
    begins with the end.
    """
    torch.manual_seed(1)
    shape = {"vocab_size": 67, "d_model": 32, "n_heads": 4, "n_layers": 8, "max_seq_len": 64}
    whole: Any = AutoModelForCausalLM.from_config(MptConfig(**shape)).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    whole.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(3, 67, (length,)).tolist() for length in (7, 3, 5)]

    def alone(prompt: list[int], **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        made = whole.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, **options
        )
        return list(made[0, len(prompt) :].tolist())

    end = alone(prompts[0])[at]  # it is the first that is said, or the third
    prompts[2][0] = end
    with opened(settings(tmp_path / "model", tmp_path), adapter=False) as model:
        options = {"eos_token_id": end, "pad_token_id": 0}
        made = complete(
            model.split,
            model.memory,
            model.files.generation_config(),
            tokenizer(),
            prompts,
            NEW,
            options,
        )
    expected = [alone(prompt, eos_token_id=end) for prompt in prompts]
    assert len(expected[0]) == at + 1
    assert [list(one.tokens) for one in made] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"strategy": "resident"}, {"device_memory": "1GB"}, {"prefetch_depth": 1}]
)
def test_where_weights_wait_changes_no_token(
    llama: Path, changes: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for each in ({}, changes):
        with opened(settings(llama, tmp_path, **each)) as model:
            found.append(streamed_tokens(model, PROMPTS))
            found.append(streamed_tokens(model, PROMPTS))
    assert all(torch.equal(tokens, found[0]) for tokens in found)


@pytest.mark.parametrize("pad", [-1, 10**6])
def test_a_pad_token_without_a_row_of_embeddings_is_replaced(
    llama: Path, pad: int, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path), adapter=False) as model:
        right = streamed_tokens(model, PROMPTS)
        assert torch.equal(streamed_tokens(model, PROMPTS, pad_token_id=pad), right)
        vocab_size = model.skeleton.config.vocab_size
        said = (
            f"the prompt holds {vocab_size}, which is outside the vocabulary of {vocab_size} tokens"
        )
        with pytest.raises(DataError, match=said):
            complete(
                model.split,
                model.memory,
                model.files.generation_config(),
                model.tokenizer,
                [[1], [2, vocab_size]],
                NEW,
                {},
            )


def test_a_model_without_an_adapter_speaks_too(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path), adapter=False) as model:
        assert torch.equal(
            streamed_tokens(model, PROMPTS), whole_tokens(whole_model(llama), PROMPTS)
        )


def test_one_prompt_may_be_given_bare(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        assert model.generate("corn", max_new_tokens=3) == model.generate(
            ["corn"], max_new_tokens=3
        )


def test_each_token_reads_the_layers_once_and_computes_only_itself(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path)) as model:
        lengths: list[int] = []
        model.skeleton.get_input_embeddings().register_forward_hook(
            lambda _, args, out: lengths.append(args[0].shape[1])
        )
        before = model.memory.counters
        tokens = streamed_tokens(model, PROMPTS[:1])
        after = model.memory.counters
        assert tokens.shape[1] == NEW
        # the rest is in the cache
        assert lengths == [len(tokenizer()(PROMPTS[0])["input_ids"])] + [1] * (NEW - 1)
        assert after.leases - before.leases == NEW * NUM_LAYERS
        # What was read ahead for a token that never came is all there is beside.
        ahead = after.layers_read - before.layers_read - NEW * NUM_LAYERS
        assert 0 <= ahead <= model.allocation.slots
        most = (NEW * NUM_LAYERS + ahead) * max(layer.nbytes for layer in model.memory.layers)
        assert after.bytes_read - before.bytes_read <= most
        assert model.memory.announced == 0


def with_generation_config(model: Path, directory: Path, **fields: Any) -> Path:
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


def test_the_model_s_own_end_of_sequence_ends_a_text(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        free = streamed_tokens(model, PROMPTS)
    end = int(free[0, 2])
    own = with_generation_config(llama, tmp_path / "own", eos_token_id=[end, 299], bos_token_id=0)
    with opened(settings(own, tmp_path)) as model:
        found = streamed_tokens(model, PROMPTS)
        alone = streamed_tokens(model, PROMPTS[:1])
    assert alone.tolist() == [free[0, :3].tolist()]
    assert torch.equal(found, whole_tokens(whole_model(own, tmp_path / "adapter"), PROMPTS))
    assert set(found[0, 3:].tolist()) <= {tokenizer().eos_token_id}


@pytest.mark.slow
def test_settings_stored_with_the_model_are_used_and_not_warned_of(
    llama: Path, tmp_path: Path, complaints: list[str]
) -> None:
    stored = {"do_sample": True, "temperature": 0.6, "top_p": 0.7, "top_k": 5, "max_length": 12}
    own = with_generation_config(llama, tmp_path / "own", **stored)
    with opened(settings(own, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        greedy = streamed_tokens(model, PROMPTS)
        torch.manual_seed(6)
        sampled = streamed_tokens(model, PROMPTS, do_sample=True)
        # nothing of one call stays for the next
        assert torch.equal(streamed_tokens(model, PROMPTS), greedy)
    assert complaints == []
    whole = whole_model(llama, tmp_path / "adapter")
    assert torch.equal(greedy, whole_tokens(whole, PROMPTS))
    torch.manual_seed(6)
    same = whole_tokens(whole, PROMPTS, do_sample=True, temperature=0.6, top_p=0.7, top_k=5)
    assert torch.equal(sampled, same)
    assert not torch.equal(sampled, greedy)


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_been_generated(llama: Path, tmp_path: Path) -> None:
    batch = collate(token_rows(4))
    found = []
    for between in (False, True):
        with opened(settings(llama, tmp_path, lora_dropout=0.1)) as model:
            trainer = model.get_trainer()
            torch.manual_seed(1)
            trainer.train_step(batch)
            if between:
                model.generate(PROMPTS, max_new_tokens=2)
                assert model.skeleton.training
            trainer.train_step(batch)
            found.append(adapter_of(model.skeleton))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Interrupt(StoppingCriteria):
    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_an_interrupted_text_leaves_the_model_usable(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        whole = streamed_tokens(model, PROMPTS)
        with pytest.raises(KeyboardInterrupt):
            streamed_tokens(model, PROMPTS, stopping_criteria=StoppingCriteriaList([Interrupt(3)]))
        assert torch.equal(streamed_tokens(model, PROMPTS), whole)
        model.get_trainer().train_step(collate(token_rows(2)))


@pytest.mark.parametrize(
    ("prompts", "where"),
    [([], "generate"), ([""], "prompt 1"), (["corn", "", "mill", ""], "prompt 2, 4")],
)
def test_a_prompt_without_tokens_is_refused(
    llama: Path, prompts: list[str], where: str, tmp_path: Path
) -> None:
    with (
        opened(settings(llama, tmp_path)) as model,
        pytest.raises(DataError, match="prompt") as caught,
    ):
        model.generate(prompts)
    assert caught.value.where == where


def test_a_misspelt_option_is_named(llama: Path, tmp_path: Path) -> None:
    with (
        opened(settings(llama, tmp_path)) as model,
        pytest.raises(ConfigError, match="generation: temprature"),
    ):
        model.generate("corn", do_sample=True, temprature=0.5)
