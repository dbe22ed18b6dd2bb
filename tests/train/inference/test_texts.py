"""Batches of texts are, token for token, what each prompt makes alone and `transformers` makes
of the same batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import NUM_LAYERS, opened, settings, tokenizer, whole_model, write_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lema import LemaModel
from lema.engine.generation import encoded
from lema.errors import ConfigError, MemoryLimitError
from lema.train.inference.texts import Completion, batches_of, completions, plan_of

PROMPTS = [
    "the miller of",
    "corn",
    "the river grinds the mill by the river of corn and",
    "mill",
    "by the river grinds",
]
NEW = 7
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40}


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def made(
    model: LemaModel, batch_size: int, *, options: dict[str, Any] | None = None, **more: Any
) -> list[Completion]:
    """All texts, in the order of the prompts."""
    ids = encoded(model.tokenizer, PROMPTS)
    batches = completions(model, ids, NEW, batch_size, options or {}, **more)
    return sorted((one for batch in batches for one in batch), key=lambda one: one.index)


def test_a_batch_is_what_transformers_makes_of_it_and_each_prompt_alone(
    base: Path, tmp_path: Path
) -> None:
    with opened(settings(base, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        found = made(model, 2)
        alone = made(model, 1)
    assert found == alone
    whole = whole_model(base, tmp_path / "adapter")
    encode = tokenizer()
    encode.pad_token = encode.eos_token
    for batch in batches_of(encoded(encode, PROMPTS), 2):
        given = [PROMPTS[index] for index in batch]
        inputs = encode(
            given,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        tokens = whole.generate(
            **inputs, do_sample=False, max_new_tokens=NEW, pad_token_id=encode.pad_token_id
        )
        for index, row in zip(
            batch, tokens[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            assert list(found[index].tokens) == row[: len(found[index].tokens)]
            assert set(row[len(found[index].tokens) :]) <= {encode.pad_token_id}
            assert found[index].text == encode.decode(row, skip_special_tokens=True)


def test_the_weights_are_read_once_per_token_of_a_batch(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        told: list[int] = []
        for batch_size, batches in ((5, 1), (2, 3)):
            before = model.memory.counters
            results = made(model, batch_size, on_token=told.append)
            assert model.memory.counters.leases - before.leases == batches * NEW * NUM_LAYERS
            assert sum(told) == sum(len(one.tokens) for one in results) == len(PROMPTS) * NEW
            told.clear()


def test_longer_prompts_come_first_and_together() -> None:
    ids = [[0] * length for length in (3, 9, 1, 8, 2)]
    assert batches_of(ids, 2) == [[1, 3], [0, 4], [2]]


def test_a_text_ends_at_a_string_and_the_others_go_on(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        free = made(model, 5)
        pairs = [
            (one, one.text[place : place + 2])
            for one in free
            for place in range(1, len(one.text) - 1)
        ]
        one, stop = next(
            (one, pair)
            for one, pair in pairs
            if pair.isascii() and sum(pair in other.text for other in free) == 1
        )
        found = made(model, 5, options={"stop_strings": [stop, "never"]})
        ended = found.pop(one.index)
        assert (ended.text, ended.finish) == (one.text[: one.text.index(stop)], "stop_string")
        assert ended.tokens == one.tokens[: len(ended.tokens)]
        assert len(ended.tokens) < NEW
        assert found == [other for other in free if other.index != one.index]
        assert {other.finish for other in found} == {"length"}
        # What a prompt ends with stops nothing.
        assert made(model, 5, options={"stop_strings": [PROMPTS[0]]}) == free
        with pytest.raises(ConfigError, match="empty string"):
            made(model, 5, options={"stop_strings": [""]})


def test_a_text_ends_at_the_token_that_ends_texts(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        free = made(model, 5)
        end = free[1].tokens[1]
        found = made(model, 5, options={"eos_token_id": end})
        place = free[1].tokens.index(end) + 1
        assert (found[1].tokens, found[1].finish) == (free[1].tokens[:place], "stop")
        with_end = [index for index, one in enumerate(free) if end in one.tokens]
        assert [one.index for one in found if one.finish == "stop"] == with_end


def test_what_is_drawn_depends_on_the_seed_and_not_on_what_is_done(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path)) as model:
        whole = made(model, 2, options=SAMPLED, seed=3)
        torch.rand(5)
        assert made(model, 2, options=SAMPLED, seed=3) == whole
        assert made(model, 2, options=SAMPLED, seed=4) != whole
        assert made(model, 2, options=SAMPLED, seed=3, done={2, 0}) == [
            whole[1],
            whole[3],
            whole[4],
        ]


def test_several_texts_of_a_prompt_stand_together(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        torch.manual_seed(1)
        texts = model.generate(PROMPTS, NEW, batch_size=2, num_return_sequences=3, **SAMPLED)
        assert len(texts) == 15
        found = made(model, 2, options={**SAMPLED, "num_return_sequences": 3}, seed=1)
        assert [one.index for one in found] == list(range(15))
        assert [one.prompt_tokens for one in found[6:9]] == [
            len(tokenizer()(PROMPTS[2])["input_ids"])
        ] * 3


def test_on_the_host_keys_and_values_come_with_their_layer_and_leave_with_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[int] = set()
    events: list[str] = []

    def note(name: str, change: Any) -> None:
        before = getattr(DynamicLayer, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            change(id(self))
            return before(self, *args, **kwargs)

        monkeypatch.setattr(DynamicLayer, name, noted)

    def update(layer: int) -> None:
        events.append("update")
        assert there <= {layer}, "keys and values of another layer are on the device"
        there.add(layer)

    with opened(settings(base, tmp_path)) as model:
        expected = made(model, 5)
        for kind in (DynamicLayer, *DynamicLayer.__subclasses__()):
            if "update" in vars(kind):
                before = kind.update
                monkeypatch.setattr(
                    kind,
                    "update",
                    lambda self, *a, before=before, **k: (update(id(self)), before(self, *a, **k))[
                        1
                    ],
                )
        note("prefetch", there.add)
        note("offload", there.discard)
        assert made(model, 5, keys_values="host") == expected
        assert len(events) == NEW * NUM_LAYERS
        assert not there


@pytest.mark.parametrize("new", [1, NEW])
def test_the_plan_counts_the_keys_and_values_that_there_are(
    base: Path, new: int, tmp_path: Path
) -> None:
    with opened(settings(base, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        plan = plan_of(model, encoded(model.tokenizer, PROMPTS), new, 3)
        assert plan is not None
    ids = torch.ones(3, plan.prompt + new - 1, dtype=torch.long)
    whole = whole_model(base, tmp_path / "adapter")
    cache = DynamicCache(config=whole.config)
    with torch.no_grad():
        whole(input_ids=ids, cache=cache, use_cache=True)
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    other = 16 * len(sizes)  # a number that layers with a window keep beside
    assert sum(sizes) <= plan.taken.keys_values <= sum(sizes) + other
    assert max(sizes) <= plan.taken.layer <= max(sizes) + other
    assert plan.taken.peak > plan.taken.keys_values
    assert (
        plan.taken.on_device(host=True)
        == plan.taken.peak - plan.taken.keys_values + plan.taken.layer
    )


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path)) as model:
        ids = encoded(model.tokenizer, PROMPTS * 8)
        one = plan_of(model, ids, 40, 1, choose=True)
    assert one is not None
    weights = 900_000
    limited = settings(llama, tmp_path, device_memory=weights + 20 * one.taken.peak)
    with opened(limited) as model:
        with pytest.raises(
            MemoryLimitError, match="40 texts of up to 14 tokens and 40 new ones"
        ) as caught:
            plan_of(model, ids, 40, 40, choose=True)
        assert caught.value.where == "device_memory"
        fitting = int(caught.value.how.split("generate ")[1].split()[0])
        assert 20 <= fitting < 40
        with pytest.raises(MemoryLimitError):
            plan_of(model, ids, 40, fitting + 1, choose=True)
        widest = plan_of(model, ids, 40, None, choose=True)
        assert widest is not None
        assert widest.rows == fitting
        # What the texts leave of the limit is spent on layers that stay.
        few = settings(llama, tmp_path, device_memory=limited.device_memory)
    with opened(few) as model:
        plan = plan_of(model, ids, 40, 2, choose=True)
        assert plan is not None
        assert len(plan.allocation.residents) > len(widest.allocation.residents)


def test_a_model_in_use_is_not_given_another_allocation(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, device_memory="2MB", max_length=8)) as model:
        before = model.allocation
        model.generate(PROMPTS, 3)
        assert model.allocation is before
        with pytest.raises(MemoryLimitError, match="do not fit"):
            model.generate(PROMPTS * 40, 40)
