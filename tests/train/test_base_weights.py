"""A model with NaN or infinity in its weights is refused before any step, wherever those weights
are kept.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smallrun import NUM_LAYERS, batch, opened, settings, token_rows, write_model
from torch import Tensor

from lema.errors import NonFiniteError

PLACES = {
    "streamed": {},
    "in host memory": {"strategy": "resident"},
    "on the device": {"device_memory": "1GB"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def poisoned(
    model: Path, name: str, change: Callable[[Tensor], object]
) -> tuple[Path, Callable[[], object]]:
    """Change a tensor of a model; return its file, and what makes it sound again."""
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            whole = file.read_bytes()
            change(tensors[name])
            save_file(tensors, file, {"format": "pt"})
            return file, partial(file.write_bytes, whole)
    raise AssertionError(f"there is no {name}")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_each_layer_s_weights_are_looked_at_before_a_step(
    place: str, llama: Path, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(llama, model_dir)
    for layer in range(NUM_LAYERS) if place == "streamed" else (0, 5):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        value = (torch.nan, torch.inf, -torch.inf)[layer % 3]
        file, mend = poisoned(
            model_dir, name, lambda tensor, value=value: tensor[3, 2].fill_(value)
        )
        changes = PLACES[place] | {"save_steps": 1, "max_skipped_steps": 100}
        with opened(settings(model_dir, tmp_path / "out", **changes)) as model:
            with pytest.raises(
                NonFiniteError, match="a weight of the model is NaN or infinite"
            ) as caught:
                model.get_trainer().fit(token_rows(8))
            assert name in caught.value.what
            # and no step was dropped for this: all would be
            assert caught.value.where == f"{file}, element [3, 2]"
        mend()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_weights_outside_the_layers_are_looked_at_when_the_model_is_opened(
    name: str, llama: Path, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(llama, model_dir)
    file, _ = poisoned(model_dir, name, lambda tensor: tensor.flatten()[-1:].fill_(torch.nan))
    with (
        pytest.raises(NonFiniteError, match=name) as caught,
        opened(settings(model_dir, tmp_path / "out")),
    ):
        pass
    assert str(file) in caught.value.where
    with opened(settings(model_dir, tmp_path / "out", check_base_weights=False)):
        pass


def test_looking_changes_no_number_and_no_count(llama: Path, tmp_path: Path) -> None:
    found = []
    for look in (True, False):
        with opened(settings(llama, tmp_path, check_base_weights=look)) as model:
            trainer = model.get_trainer()
            losses = [trainer.train_step(batch(seed))[1] for seed in (1, 2)]
            counters = model.adapter.counters
            found.append(
                (
                    losses,
                    counters.bytes_read,
                    counters.bytes_uploaded,
                    counters.layers_read,
                    counters.leases,
                )
            )
    assert found[0] == found[1]
