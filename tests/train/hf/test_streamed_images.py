"""`lema.streamed` of a published class that sees images: the numbers of the whole model with PEFT,
and what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from everytype import difference
from imagerows import BROKEN, LOOPED, TOWERLESS, image_batch, publish_with_images
from imagerows import STREAMED_IMAGES as STREAMED
from libraryversions import recomputation
from parity import draw_b
from peft import LoraConfig, PeftModel, get_peft_model
from publishedclass import published_class
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Trainer, TrainingArguments
from writtenonce import Directories, written_once

import lema
from lema import LemaConfig, StreamingMixin
from lema.errors import ConfigError, ModelError, WeightsError
from lema.plan.blueprint import draw_up

SEED = 42
ROWS = {"several, one and none": [2, 1, 0], "one row": [1], "text alone": [0, 0]}
# Of text alone to a last bit, with towers open or not: products of few tokens by an expert.
CLOSE = {("qwen3_vl_moe", "text alone"): 1e-6}
CLOSE |= {(kind, rows): 1e-5 for kind in ("glm4v_moe", "janus") for rows in ROWS}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, which is written once."""
    return written_once(tmp_path_factory.mktemp("published"), publish_with_images)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    )


@contextmanager
def opened(directory: Path, adapter: Any = None, **settings: Any) -> Iterator[Any]:
    options = {"modalities": "all", "seed": SEED, "device_memory": None, **settings}
    model = lema.streamed(directory, adapter or lora(), device="cpu", **options)
    try:
        yield model
    finally:
        model.close()


def whole_base(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    kind = published_class(AutoConfig.from_pretrained(directory))
    return aligned(kind.from_pretrained(directory, dtype=dtype))


def whole(directory: Path, streamed: PeftModel, dtype: torch.dtype = torch.float32) -> Any:
    base = whole_base(directory, dtype)
    torch.manual_seed(SEED)
    return get_peft_model(base, streamed.peft_config["default"])


def step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return loss, logits and every gradient that is there."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    output = model(**batch)
    output.loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return output.loss.detach(), output.logits.detach(), gradients


def farthest(one: Any, other: Any) -> float:
    """Return the largest difference of two steps; of gradients that one of them has not, how
    they differ from zero."""
    names = one[2].keys() | other[2].keys()
    gradients = (difference(one[2].get(name), other[2].get(name)) for name in names)
    return max(difference(one[0], other[0]), difference(one[1], other[1]), *gradients)


@pytest.mark.parametrize(
    ("targets", "towers"),
    [("all-linear", "device"), (TOWERLESS, "device"), (TOWERLESS, "stream")],
    ids=["all", "text", "streamed towers"],
)
@pytest.mark.parametrize("model_type", STREAMED)
# of PEFT, where it was given the targets that it has made of those that were asked for
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not:RuntimeWarning")
def test_a_model_that_sees_images_has_the_numbers_of_the_whole_one(
    model_type: str, targets: str, towers: str, published: Directories
) -> None:
    directory = published(model_type)
    with opened(directory, lora(target_modules=targets), towers=towers) as model:
        reference = whole(directory, model)
        for part in (model, reference):
            draw_b(part)
            part.train()
        adapted = [name for name, one in reference.named_parameters() if one.requires_grad]
        on_towers = {name for name in adapted if model.opened.split.layers_name not in name}
        assert bool(on_towers) == (targets == "all-linear")
        for rows, images in ROWS.items():
            batch = image_batch(reference, images)
            expected = step(reference, batch)
            assert sum(images) == 0 or "pixel_values" in batch
            if sum(images) and on_towers:  # some types leave their last layers out
                assert any(bool(expected[2][name].any()) for name in on_towers & expected[2].keys())
            for recompute in (True, False):
                getattr(model, f"{recomputation()}_{'enable' if recompute else 'disable'}")()
                limit = CLOSE.get((model_type, rows), 0.0)
                assert farthest(step(model, batch), expected) <= limit, rows


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_vl", {"embeddings": "disk", "towers": "stream"}),
        ("qwen3_5", {"embeddings": "host"}),
        ("gemma3", {"strategy": "resident"}),
        ("gemma4", {"host_memory": "64MB"}),
        ("llava", {"dtype": "bfloat16", "towers": "stream"}),
    ],
    ids=str,
)
def test_wherever_weights_are_the_numbers_are_the_same(
    model_type: str, settings: dict[str, str], published: Directories
) -> None:
    directory = published(model_type)
    dtype: torch.dtype = getattr(torch, settings.get("dtype", "float32"))
    with opened(directory, lora(target_modules=TOWERLESS), **settings) as model:
        reference = whole(directory, model, dtype)
        for part in (model, reference):
            draw_b(part)
            part.train()
        batch = image_batch(reference, [2, 1, 0])
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            assert farthest(step(model, batch), step(reference, batch)) == 0.0


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3", "qwen3_5", "idefics3"])
def test_what_it_saves_is_read_by_peft_on_the_published_class(
    model_type: str, published: Directories, tmp_path: Path
) -> None:
    directory = published(model_type)
    base = whole_base(directory)
    batch = image_batch(base, [1, 2])
    with opened(directory) as model:
        draw_b(model)
        with torch.no_grad():
            logits = model(**batch).logits
            without = base(**batch).logits
        model.save_pretrained(str(tmp_path))
    read = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(read(**batch).logits, logits)
    assert not torch.equal(logits, without)
    with opened(directory, tmp_path) as again, torch.no_grad():
        assert torch.equal(again(**batch).logits, logits)


@pytest.mark.parametrize("targets", ["all-linear", TOWERLESS], ids=["all", "text"])
@pytest.mark.parametrize(
    "model_type", ["llava", "llava_next", "qwen2_vl", "qwen3_vl", "gemma3", "gemma4", "qwen3_5"]
)
def test_rows_are_cut_into_micro_batches_with_what_belongs_to_them(
    model_type: str, targets: str, published: Directories
) -> None:
    directory = published(model_type)
    with opened(directory, lora(target_modules=targets), micro_batch_size=1) as model:
        reference = whole(directory, model)
        for part in (model, reference):
            draw_b(part)
            part.train()
        before = model.opened.memory.counters.leases
        for images in ([2, 1, 0, 1], [0, 3], [1, 1, 1]):
            batch = image_batch(reference, images)
            seen = batch["attention_mask"] == 1  # what is masked at the end is not computed
            steps = [
                (loss, logits[seen], gradients)
                for loss, logits, gradients in (step(model, batch), step(reference, batch))
            ]
            assert farthest(*steps) < 1e-4, images
        layers = model.opened.split.num_layers
        # up and down once each, and the first batch learns; the top layer is not leased again
        assert model.opened.memory.counters.leases - before <= 3 * 2 * layers + 1


@pytest.mark.parametrize("model_type", STREAMED)
def test_a_model_opened_for_text_refuses_images_in_a_sentence(
    model_type: str, published: Directories
) -> None:
    directory = published(model_type)
    base = whole_base(directory)
    with opened(directory, modalities="text") as model:
        with pytest.raises(ConfigError, match='set modalities="all"') as caught:
            model(**image_batch(base, [1]))
        words = str(caught.value)
        assert "opened for text alone" in words or "class that trains on text alone" in words
        assert model(**image_batch(base, [0])).loss is not None


def test_towers_are_read_and_counted_only_where_they_are_asked_for(published: Directories) -> None:
    directory = published("llava")
    sizes = {}
    for modalities in ("text", "all"):
        with opened(directory, modalities=modalities) as model:
            outer = model.opened.outer
            inside = [
                (name, one)
                for name, one in model.opened.skeleton.named_parameters()
                if "projector" in name and "lora_" not in name
            ]
            assert all(one.is_meta == (modalities == "text") for _, one in inside)
            sizes[modalities] = outer.nbytes
            settings = {"lora_target_modules": ["q_proj"], "device": "cpu"}
            plan = draw_up(LemaConfig(str(directory), modalities=modalities, **settings))
            assert plan.outside_bytes == outer.nbytes
    towers = sum(
        one.nbytes
        for name, one in whole_base(directory).named_parameters()
        if "vision_tower" in name or "multi_modal_projector" in name
    )
    # Each tensor begins at a multiple of a few bytes.
    assert 0 <= sizes["all"] - sizes["text"] - towers < 64 * 200


def test_layers_of_a_tower_are_leased_once_for_a_batch_with_images(published: Directories) -> None:
    directory = published("llava")
    base = whole_base(directory)
    layers = base.model.vision_tower.encoder.layers
    settings = {"lora_target_modules": ["q_proj"], "device": "cpu", "modalities": "all"}
    sizes = {
        towers: draw_up(LemaConfig(str(directory), towers=towers, **settings)).outside_bytes
        for towers in ("device", "stream")
    }
    with opened(directory, lora(target_modules=TOWERLESS), towers="stream") as model:
        outer = model.opened.outer
        assert outer.nbytes == sizes["stream"]
        tower = model.opened.skeleton.get_submodule("model.vision_tower.encoder.layers")
        assert all(one.is_meta for one in tower.parameters())
        counters = outer.tower_layers.stream.counters
        assert counters.leases == 0
        for batches, images in ((1, [2, 1]), (1, [0, 0]), (2, [1])):
            step(model, image_batch(base, images))
            assert outer.tower_layers.stream.counters.leases == batches * len(layers)
    nbytes = sum(one.nbytes for one in layers.parameters())
    saved = nbytes - 2 * nbytes // len(layers)
    # Layers begin and end at pages.
    assert abs(sizes["device"] - sizes["stream"] - saved) < 4 * 4096


def test_what_trains_in_a_tower_keeps_it_from_streaming(published: Directories) -> None:
    directory = published("llava")
    refused = pytest.raises(ConfigError, match="layers of towers stream frozen")
    with refused, opened(directory, towers="stream"):
        pass


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3", "idefics3"])
def test_it_generates_from_an_image_what_the_whole_model_does(
    model_type: str, towers: str, published: Directories
) -> None:
    directory = published(model_type)
    with opened(directory, lora(target_modules=TOWERLESS), towers=towers) as model:
        reference = whole(directory, model)
        batch = image_batch(reference, [2])
        del batch["labels"]
        tokens = []
        for part in (reference, model):
            draw_b(part)
            tokens.append(part.eval().generate(**batch, max_new_tokens=6, do_sample=False))
        assert torch.equal(*tokens)
        assert tokens[0].shape[1] > batch["input_ids"].shape[1]


class Kept(Trainer):
    """Keeps the loss of every batch, unrounded."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss)
        return loss


class Streaming(StreamingMixin, Kept):
    pass


@pytest.mark.parametrize("trainer", [Kept, Streaming])
@pytest.mark.parametrize("targets", ["all-linear", TOWERLESS], ids=["all", "text"])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:gradients are accumulated")
def test_a_trainer_accumulates_over_batches_with_images(
    trainer: Any, targets: str, published: Directories, tmp_path: Path
) -> None:
    directory = published("qwen3_vl")
    base = whole_base(directory)
    batches = [
        image_batch(base, images, seed=seed)
        for seed, images in enumerate(([2, 1], [1, 0], [1, 1], [0, 0], [1, 3], [0, 1]))
    ]
    options = {recomputation(): True, "save_strategy": "no", "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        disable_tqdm=True,
        **options,
    )
    outcomes = []
    with opened(directory, lora(target_modules=targets)) as model:
        for trained, kind in ((whole(directory, model), Kept), (model, trainer)):
            run = kind(
                trained, arguments, train_dataset=batches, data_collator=lambda rows: rows[0]
            )
            run.train()
            weights = {
                name: one.detach().clone()
                for name, one in trained.named_parameters()
                if one.requires_grad
            }
            outcomes.append((run.losses, weights))
        leases = model.opened.memory.counters.leases
        layers = model.opened.split.num_layers
        assert leases == (3 if trainer is Streaming else 6) * 2 * layers + 1
    (losses, expected), (streamed_losses, weights) = outcomes
    assert len(losses) == len(batches) and streamed_losses == losses
    assert all(torch.equal(one, expected[name]) for name, one in weights.items())


def test_a_frozen_tower_runs_without_a_graph(published: Directories) -> None:
    directory = published("llava")
    with opened(directory, lora(target_modules=TOWERLESS)) as model:
        outputs: list[Any] = []
        tower = model.opened.skeleton.get_submodule("model.multi_modal_projector")
        tower.register_forward_hook(lambda *args: outputs.append(args[-1]))
        model.train()
        # as trainers do that recompute; transformers then makes embeddings, of towers as well,
        # require a gradient
        model.enable_input_require_grads()
        batch = image_batch(whole_base(directory), [1])
        model(**batch).loss.backward()
        assert [one.requires_grad for one in outputs] == [False]


def test_types_that_do_not_run_on_text_are_refused_in_a_sentence(published: Directories) -> None:
    directory = published(LOOPED)
    batch = image_batch(whole_base(directory), [1])
    with opened(directory) as model, pytest.raises(ModelError, match="once each, in their order"):
        model(**batch)


def test_a_type_that_transformers_fails_on_is_refused_and_else_has_the_same_numbers(
    published: Directories,
) -> None:
    directory = published(BROKEN)
    with opened(directory, lora(target_modules=TOWERLESS)) as model:
        reference = whole(directory, model)
        for part in (model, reference):
            draw_b(part)
            part.train()
        batch = image_batch(reference, [2, 1, 0])
        try:
            expected = step(reference, batch)
        except AttributeError as error:
            with pytest.raises(ModelError, match=str(error)):
                step(model, batch)
        else:
            assert farthest(step(model, batch), expected) == 0.0


def test_a_checkpoint_without_its_tower_is_refused(published: Directories, tmp_path: Path) -> None:
    directory = published("llava")
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if "vision_tower" not in name}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with opened(tmp_path, modalities="text"):
        pass
    with pytest.raises(WeightsError, match="tensors of the towers"), opened(tmp_path):
        pass
