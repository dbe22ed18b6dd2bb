"""What towers make of images is kept on disk: a second epoch and a second run read no tower, and
the numbers are those of images that were computed anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from imagerows import STREAMED_IMAGES, TOWERLESS, image_batch, publish_with_images
from parity import draw_b
from peft import LoraConfig
from publishedclass import published_class
from soundrows import SOUND_TYPES, publish_with_sounds, sound_batch, video_batch
from transformers import AutoConfig
from wholesteps import farthest, numbers_of_step, whole_as

import lema
from lema.errors import ConfigError
from lema.model.skeleton import is_in
from lema.model.towers.store import TowerOutputs, TowerStore

SEED = 42
EPOCH = ([2, 1, 0], [0, 0], [1, 2])
TEXT = TOWERLESS.replace("tower", "tower|audio")
LIMIT = 1e-5
# Types whose towers round otherwise where one image is computed alone, or whose experts do so.
ROUNDED = ("deepseek_vl_hybrid", "gemma4", "glm4v_moe", "got_ocr2", "janus", "lighton_ocr")
ROUNDED += ("mistral3", "qwen3_vl_moe", "vipllava", "voxtral")


@contextmanager
def opened(directory: Path, cache: Path | str, **settings: Any) -> Iterator[Any]:
    adapter = LoraConfig(r=4, target_modules=TEXT, task_type="CAUSAL_LM")
    options = {"modalities": "all", "seed": SEED, "tower_cache": str(cache), **settings}
    model = lema.streamed(directory, adapter, device="cpu", **options)
    draw_b(model)
    model.train()
    try:
        yield model
    finally:
        model.close()


def tower_bytes(model: Any) -> int:
    """Bytes of the towers that are in memory, but for a number that stands for one of them."""
    outer = model.opened.outer
    return sum(
        parameter.untyped_storage().nbytes()
        for name, parameter in model.opened.skeleton.named_parameters()
        if is_in(name, outer.towers)
        and not parameter.is_meta
        and parameter.untyped_storage().nbytes() > parameter.itemsize
    )


# of PEFT, where it was given the targets that it has made of those that were asked for
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not:RuntimeWarning")
@pytest.mark.parametrize("model_type", [*STREAMED_IMAGES, "voxtral"])
def test_a_second_epoch_and_a_second_run_read_no_tower(model_type: str, tmp_path: Path) -> None:
    hears = model_type in SOUND_TYPES
    write = publish_with_sounds if hears else publish_with_images
    directory = write(model_type, tmp_path / "model")
    outcomes = []
    for run in range(2):
        with opened(directory, tmp_path / "cache") as model:
            kept = model.opened.outer.cached_towers
            assert not kept.loaded and tower_bytes(model) == 0
            reference = whole_as(model, directory, SEED)
            for epoch in range(2):
                misses = kept.store.misses
                for counts in EPOCH:
                    batch = (
                        sound_batch(model_type, counts) if hears else image_batch(reference, counts)
                    )
                    numbers = numbers_of_step(model, batch)
                    limit = LIMIT if model_type in ROUNDED else 0.0
                    assert farthest(numbers, numbers_of_step(reference, batch)) <= limit
                    outcomes.append(numbers)
                assert (kept.store.misses > misses) == ((run, epoch) == (0, 0))
            assert kept.loaded == (run == 0) and kept.store.hits > 0
            assert (tower_bytes(model) == 0) == (run == 1)
    # The numbers do not go by what was there.
    for number, numbers in enumerate(outcomes):
        assert farthest(numbers, outcomes[number % len(EPOCH)]) == 0.0


def test_layers_of_a_tower_that_stream_are_not_read_either(tmp_path: Path) -> None:
    directory = publish_with_images("qwen3_vl", tmp_path / "model")
    for run in range(2):
        with opened(directory, tmp_path / "cache", towers="stream") as model:
            reference = whole_as(model, directory, SEED)
            for _ in range(2):
                for counts in EPOCH:
                    numbers_of_step(model, image_batch(reference, counts))
            counters = model.opened.outer.tower_layers.stream.counters
            images = model.opened.outer.cached_towers.store.misses
            assert images == (3 if run == 0 else 0)
            layers = len(reference.get_base_model().model.visual.blocks)
            assert counters.leases == images * layers
            # and what of the tower is outside its layers
            assert (tower_bytes(model) > 0) == (run == 0)


def test_frames_of_a_video_are_kept_as_images_are(tmp_path: Path) -> None:
    directory = publish_with_images("qwen3_vl", tmp_path / "model")
    with opened(directory, tmp_path / "cache") as model:
        reference = whole_as(model, directory, SEED)
        store = model.opened.outer.cached_towers.store
        batch = video_batch(reference, [2, 1])
        expected = numbers_of_step(reference, batch)
        assert farthest(numbers_of_step(model, batch), expected) <= LIMIT
        assert (store.misses, store.hits) == (3, 0)
        assert farthest(numbers_of_step(model, batch), expected) <= LIMIT
        assert (store.misses, store.hits) == (3, 3)


def test_other_weights_and_other_pixels_are_computed(tmp_path: Path) -> None:
    directory = publish_with_images("llava", tmp_path / "model")
    with opened(directory, tmp_path / "cache") as model:
        reference = whole_as(model, directory, SEED)
        batch = image_batch(reference, [1])
        numbers_of_step(model, batch)
        batch["pixel_values"][0, 0, 0, 0] += 1e-3
        assert farthest(numbers_of_step(model, batch), numbers_of_step(reference, batch)) <= LIMIT
        store = model.opened.outer.cached_towers.store
        assert (store.misses, store.hits) == (2, 0)
        base = reference.get_base_model()
    with torch.no_grad():
        base.model.vision_tower.encoder.layers[0].mlp.fc1.bias.add_(0.5)
    weights = {name.replace(".base_layer", ""): one for name, one in base.state_dict().items()}
    other = published_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory)
    other.load_state_dict(weights, strict=False)
    other.save_pretrained(tmp_path / "other")
    with opened(tmp_path / "other", tmp_path / "cache") as model:
        assert (
            farthest(
                numbers_of_step(model, batch),
                numbers_of_step(whole_as(model, tmp_path / "other", SEED), batch),
            )
            <= LIMIT
        )
        store = model.opened.outer.cached_towers.store
        assert (store.misses, store.hits) == (1, 0)


@pytest.mark.parametrize("harm", ["cut", "bits", "header", "kind"])
def test_a_damaged_output_is_made_anew(harm: str, tmp_path: Path) -> None:
    directory = publish_with_images("gemma3", tmp_path / "model")
    cache = tmp_path / "cache"
    with opened(directory, cache) as model:
        batch = image_batch(whole_as(model, directory, SEED), [1])
        expected = numbers_of_step(model, batch)
    (file,) = cache.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    sound = bytes(content)
    if harm == "cut":
        del content[-7:]
    elif harm == "bits":
        content[-3] ^= 4
    elif harm == "header":
        content[:8] = b"\xff" * 8
    else:
        content = bytearray(content.replace(b"BaseModelOutput", b"DaseModelOutput"))
    assert bytes(content) != sound
    file.write_bytes(content)
    with opened(directory, cache) as model:
        with pytest.warns(UserWarning, match="damaged and made anew"):
            assert farthest(numbers_of_step(model, batch), expected) == 0.0
        assert model.opened.outer.cached_towers.loaded
    with opened(directory, cache) as model:
        assert farthest(numbers_of_step(model, batch), expected) == 0.0
        assert not model.opened.outer.cached_towers.loaded


def test_a_full_folder_is_read_and_gets_no_larger(tmp_path: Path) -> None:
    directory = publish_with_images("llava", tmp_path / "model")
    cache = tmp_path / "cache"
    with opened(directory, cache, tower_cache_size=2000) as model:
        reference = whole_as(model, directory, SEED)
        batch = image_batch(reference, [3, 1])
        with pytest.warns(UserWarning, match="raise tower_cache_size") as caught:
            assert (
                farthest(numbers_of_step(model, batch), numbers_of_step(reference, batch)) <= LIMIT
            )
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (
                farthest(numbers_of_step(model, batch), numbers_of_step(reference, batch)) <= LIMIT
            )
        store = model.opened.outer.cached_towers.store
        nbytes = sum(file.stat().st_size for file in cache.rglob("*.safetensors"))
        assert 0 < nbytes == store.nbytes <= 2000
        assert store.hits > 0


def test_what_trains_or_draws_in_a_tower_is_refused(tmp_path: Path) -> None:
    directory = publish_with_images("llava", tmp_path / "model")
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"modalities": "all", "tower_cache": str(tmp_path / "cache"), "device": "cpu"}
    with pytest.raises(ConfigError, match="something in the towers trains"):
        lema.streamed(directory, adapter, **options)
    with opened(directory, tmp_path / "cache") as model:
        batch = image_batch(whole_as(model, directory, SEED), [1])
        tower = model.opened.skeleton.get_submodule("model.multi_modal_projector")
        tower.register_forward_hook(lambda *args: torch.nn.functional.dropout(args[-1], 0.5))
        with pytest.raises(ConfigError, match="draw random numbers"):
            model(**batch)
    with pytest.raises(ConfigError, match="modalities: text reads no towers"):
        lema.streamed(directory, adapter, tower_cache=True, device="cpu")


def test_a_type_whose_towers_have_no_method_is_refused(tmp_path: Path) -> None:
    directory = publish_with_sounds("qwen2_audio", tmp_path / "model")
    refused = pytest.raises(ConfigError, match="has no method that computes the output")
    with refused, opened(directory, tmp_path / "cache"):
        pass


def test_a_store_gives_back_trees_of_any_type(tmp_path: Path) -> None:
    store = TowerStore(tmp_path / "new" / "folder", 10**6, print)
    values = {
        "pooler_output": (torch.arange(6.0).view(2, 3).bfloat16(), torch.zeros(0, 3)),
        "deepstack_features": [torch.ones(2, 1).t(), [torch.tensor(7)]],
    }
    assert store.read("ab12") is None
    store.write("ab12", TowerOutputs("Kind", values))
    found = TowerStore(tmp_path / "new" / "folder", 10**6, print).read("ab12")
    assert found is not None and found.kind == "Kind"
    assert repr(found.values) == repr(values)
    assert list(store.read("ab12").values) == list(values)  # type: ignore[union-attr] # it is there
