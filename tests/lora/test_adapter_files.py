"""Adapters to and from disk: PEFT's format unchanged, the older format, and nothing that does
not fit.
"""

import io
import json
import os
import pickle
import random
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from smallrun import (
    LINEAR,
    VOCABULARY,
    adapter_of,
    opened,
    peft_adapter,
    settings,
    streamed_logits,
    whole_logits,
    whole_model,
    write_model,
)
from tiny import NUM_LAYERS as TINY_LAYERS
from tiny import write_checkpoint

from lema import LemaModel, MemoryStrategy
from lema.errors import AdapterError, ConfigError
from lema.lora import save_adapter
from lema.lora.files import _read_old, read_settings
from lema_cpu import CpuBackend
from lema_neuron.shards.ranks import load_rank

LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(9))


@pytest.mark.slow
def test_peft_loads_what_is_saved_and_says_the_same(
    base: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    with opened(settings(base, tmp_path)) as model:
        model.get_trainer().train_step(ids)
        model.save_pretrained(tmp_path / "adapter")
        streamed = streamed_logits(model, ids)
    with_adapter = whole_logits(whole_model(base, tmp_path / "adapter"), ids)
    assert float((with_adapter - streamed).abs().max()) == 0.0
    assert not torch.equal(with_adapter, whole_logits(whole_model(base), ids))
    written = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "lema_config.json"} <= written
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "adapter").iterdir()} == {
        0o666 & ~mask
    }


def test_an_adapter_that_peft_saved_is_loaded(
    base: Path, name: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    directory = peft_adapter(base, tmp_path / "adapter", name)
    model = LemaModel.from_pretrained(directory, device="cpu", backend=CpuBackend(poison=True))
    expected = whole_model(base, directory)
    assert torch.equal(streamed_logits(model, ids), whole_logits(expected, ids))
    assert model.config.model_name_or_path == str(base)
    assert (model.config.lora_rank, model.config.lora_alpha) == (3, 6)
    assert model.config.lora_target_modules == LINEAR[name]
    model.save_pretrained(tmp_path / "copy")
    assert load_file(tmp_path / "copy" / "adapter_model.safetensors").keys() == adapter_keys(
        directory
    )
    model.close()


def adapter_keys(directory: Path) -> Any:
    return load_file(directory / "adapter_model.safetensors").keys()


def old_directory(base: Path, name: str, peft_directory: Path, directory: Path) -> Path:
    """Write what earlier versions wrote, with the numbers of an adapter that PEFT wrote."""
    directory.mkdir()
    prefix = f"base_model.model.{LAYERS[name]}."
    old = {}
    for key, tensor in load_file(peft_directory / "adapter_model.safetensors").items():
        layer, _, rest = key.removeprefix(prefix).partition(".")
        old[f"{int(layer) + 1}.{rest.removesuffix('.weight')}"] = tensor
    assert "1.attn.c_attn.lora_A" in old or "1.self_attn.q_proj.lora_A" in old
    torch.save(old, directory / "adapter_model.bin")
    config = {
        "model_name_or_path": str(base),
        "model_type": name,
        "gbi_path": None,
        "device": "cpu",
        "strategy": "streaming",
        "ram_buffer_size": 2,
        "vram_buffer_size": 1,
        "use_lora": True,
        "lora_rank": 3,
        "lora_alpha": 6,
        "lora_target_modules": LINEAR[name],
        "learning_rate": 1e-4,
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 512,
        "gradient_checkpointing": False,
        "save_steps": 500,
        "output_dir": "output",
        "dtype": "float32",
        "attn_implementation": "eager",
    }
    (directory / "lema_config.json").write_text(json.dumps(config, indent=4))
    return directory


def test_a_directory_of_the_older_format_is_loaded(
    base: Path, name: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    peft_directory = peft_adapter(base, tmp_path / "peft", name)
    directory = old_directory(base, name, peft_directory, tmp_path / "old")
    with pytest.warns(
        UserWarning, match="ram_buffer_size, vram_buffer_size, use_lora, max_seq_length"
    ):
        model = LemaModel.from_pretrained(directory, micro_batch_size=1)
    assert model.config.micro_batch_size == 1
    expected = whole_model(base, peft_directory, attn_implementation="eager")
    assert torch.equal(streamed_logits(model, ids), whole_logits(expected, ids))
    model.save_pretrained(tmp_path / "new")
    saved, given = (
        load_file(d / "adapter_model.safetensors") for d in (tmp_path / "new", peft_directory)
    )
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[key], given[key]) for key in given)
    LemaModel.from_pretrained(tmp_path / "new").close()  # with nothing left to warn of
    model.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda old: old.pop("8.self_attn.v_proj.lora_B"),
            "missing .*layers.7.self_attn.v_proj.lora_B",
        ),
        (
            lambda old: old.update({"9.self_attn.v_proj.lora_B": torch.zeros(16, 3)}),
            "unexpected .*layers.8",
        ),
        (
            lambda old: old.update({"1.self_attn.q_proj.lora_A": torch.zeros(5, 32)}),
            "size mismatch",
        ),
        (
            lambda old: old.update({"x.self_attn.q_proj.lora_A": torch.zeros(3, 32)}),
            "not an adapter of the older",
        ),
        (lambda old: old.update({"1.self_attn.q_proj.lora_A": 3}), "not an adapter of the older"),
    ],
)
def test_an_older_adapter_that_does_not_fit_is_refused(
    llama: Path, spoil: Any, words: str, tmp_path: Path
) -> None:
    directory = old_directory(
        llama, "llama", peft_adapter(llama, tmp_path / "peft"), tmp_path / "old"
    )
    old = torch.load(directory / "adapter_model.bin", weights_only=True)
    spoil(old)
    torch.save(old, directory / "adapter_model.bin")
    with (
        pytest.warns(UserWarning, match="earlier version"),
        pytest.raises(AdapterError, match=words) as caught,
    ):
        LemaModel.from_pretrained(directory)
    assert caught.value.where == str(directory / "adapter_model.bin")


def pickled(adapter: Path, **more: Any) -> Path:
    """Write an adapter's weights as PEFT did before safetensors, and in their place."""
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file) | more, adapter / "adapter_model.bin")
    file.unlink()
    return adapter


def test_weights_that_peft_wrote_before_safetensors_are_read(
    base: Path, name: str, ids: torch.Tensor, tmp_path: Path
) -> None:
    adapter = pickled(peft_adapter(base, tmp_path / "adapter", name))
    model = LemaModel.from_pretrained(adapter, device="cpu")
    assert torch.equal(streamed_logits(model, ids), whole_logits(whole_model(base, adapter), ids))
    model.close()
    pickled(
        peft_adapter(base, tmp_path / "other", name), **{"base_model.model.lora_A": torch.zeros(1)}
    )
    with pytest.raises(AdapterError, match=r"unexpected base_model\.model\.lora_A"):
        LemaModel.from_pretrained(tmp_path / "other", device="cpu")


def test_code_in_weights_that_peft_wrote_is_not_run(llama: Path, tmp_path: Path) -> None:
    adapter = peft_adapter(llama, tmp_path / "adapter")
    ran = tmp_path / "ran"
    pickled(adapter, evil=Evil(ran))
    with pytest.raises(AdapterError, match="only tensors are loaded from it"):
        LemaModel.from_pretrained(adapter, device="cpu")
    assert not ran.exists()


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_tensor_in_an_older_adapter_that_stands_for_more_than_the_file_has_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    directory = old_directory(
        llama, "llama", peft_adapter(llama, tmp_path / "peft"), tmp_path / "old"
    )
    many = torch.zeros(1, dtype=torch.bfloat16).expand(10**9)
    torch.save({"1.self_attn.q_proj.lora_A": many}, directory / "adapter_model.bin")
    with (
        pytest.warns(UserWarning, match="earlier version"),
        pytest.raises(AdapterError, match="more numbers than"),
    ):
        LemaModel.from_pretrained(directory)


@pytest.mark.parametrize(
    "write", [lambda thing, file: torch.save(thing, file), lambda thing, file: dump(thing, file)]
)
def test_code_in_an_older_adapter_is_not_run(llama: Path, write: Any, tmp_path: Path) -> None:
    directory = old_directory(
        llama, "llama", peft_adapter(llama, tmp_path / "peft"), tmp_path / "old"
    )
    ran = tmp_path / "ran"
    write({"1.self_attn.q_proj.lora_A": Evil(ran)}, directory / "adapter_model.bin")
    with (
        pytest.warns(UserWarning, match="earlier version"),
        pytest.raises(AdapterError, match="older format"),
    ):
        LemaModel.from_pretrained(directory)
    assert not ran.exists()
    with suppress(RuntimeError):  # the bare pickle is not a file of torch's
        torch.load(directory / "adapter_model.bin", weights_only=False)  # it is a bomb indeed
    assert ran.exists()


def spoilt_archives() -> Iterator[bytes]:
    """An archive that unpacks to a thousand times its bytes, and nesting without an end."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    yield packed.getvalue()
    yield b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


def test_whatever_stands_in_an_older_adapter_it_is_refused_by_name(tmp_path: Path) -> None:
    """Hundreds of files, one byte or many of which are others: no error but the one that names
    the file.
    """
    made = []
    for zipped in (True, False):
        saved = io.BytesIO()
        torch.save({"1.q.lora_A": torch.ones(2, 3)}, saved, _use_new_zipfile_serialization=zipped)
        made.append(saved.getvalue())
    file = tmp_path / "adapter_model.bin"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        for reading in (lambda: _read_old(file, "layers"), lambda: load_rank(file)):
            with suppress(AdapterError):
                reading()

    for content in spoilt_archives():
        file.write_bytes(content)
        with pytest.raises(AdapterError, match=r"adapter_model\.bin"):
            load_rank(file)
        read(content)
    draw = random.Random(0)
    for _ in range(500):
        spoilt = bytearray(draw.choice(made))
        for _ in range(draw.choice((1, 3, 10, 40))):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(bytes(spoilt))


@pytest.mark.timeout(20)
def test_a_pipe_is_no_adapter(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="regular file"):
        load_rank(tmp_path / "adapter_model.bin")


def dump(thing: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(thing, protocol=2))


def test_overrides_replace_saved_settings(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
    overrides = {"seed": 7, "strategy": "resident", "lora_dropout": 0.25, "lora_rank": 4}
    again = LemaModel.from_pretrained(tmp_path / "adapter", **overrides)
    assert (again.config.seed, again.config.strategy) == (7, MemoryStrategy.RESIDENT)
    assert {
        module.p
        for key, module in again.skeleton.named_modules()
        if key.endswith("lora_dropout.default")
    } == {0.25}
    again.close()
    with pytest.raises(ConfigError, match="unknown setting 'sede'"):
        LemaModel.from_pretrained(tmp_path / "adapter", sede=7)


def test_saving_over_an_adapter_replaces_it(llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        model.save_pretrained(tmp_path / "adapter")
        model.get_trainer().train_step(ids)
        model.save_pretrained(tmp_path / "adapter")
        loaded = whole_model(llama, tmp_path / "adapter")
        assert isinstance(loaded, PeftModel)
        trained = adapter_of(model.skeleton)
        found = adapter_of(loaded)
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[key], trained[key]) for key in trained)
    assert [
        path.name for path in (tmp_path / "adapter").iterdir() if path.name.startswith(".")
    ] == []


def test_a_directory_without_an_adapter_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"neither lema_config.json nor adapter_config.json"):
        LemaModel.from_pretrained(tmp_path, device="cpu")
    settings(llama, tmp_path).save_pretrained(tmp_path)
    with pytest.raises(
        AdapterError, match=r"neither adapter_model.safetensors nor adapter_model.bin"
    ):
        LemaModel.from_pretrained(tmp_path)


def test_an_adapter_of_another_shape_is_refused(llama: Path, tmp_path: Path) -> None:
    directory = peft_adapter(llama, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != gone}, file)
    with pytest.raises(
        AdapterError, match=r"missing .*layers\.3\.self_attn\.q_proj\.lora_A"
    ) as caught:
        LemaModel.from_pretrained(directory, device="cpu")
    assert caught.value.where == str(file)
    save_file({**tensors, gone: torch.zeros(5, 32)}, file)
    with pytest.raises(AdapterError, match="does not fit the model"):
        LemaModel.from_pretrained(directory, device="cpu")
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(AdapterError, match="damaged"):
        LemaModel.from_pretrained(directory, device="cpu")


# Settings of an adapter, each with another value that its files do not tell apart from the first by
# shape alone.
OTHERS: dict[str, tuple[Any, Any]] = {
    "lora_rank": (4, 8),
    "lora_alpha": (8, 9),
    "lora_target_modules": (["q_proj", "v_proj"], ["q_proj"]),
    "lora_exclude_modules": (None, ["layers.3.self_attn.q_proj"]),
    "lora_rank_pattern": ({"v_proj": 2}, {"q_proj": 2}),
    "lora_alpha_pattern": ({"v_proj": 2}, {}),
    "lora_use_rslora": (True, False),
    "lora_layers_to_transform": ([2, 1], [1, 3]),
    "lora_bias": ("none", "all"),
    "lora_modules_to_save": (None, ["lm_head"]),
    "lora_use_dora": (False, True),
    "lora_trainable_token_indices": ([3, 5], [5, 3]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OTHERS)
def test_no_setting_of_an_adapter_can_be_overridden_but_its_dropout(
    llama: Path, name: str, tmp_path: Path
) -> None:
    value, other = OTHERS[name]
    config = settings(llama, tmp_path, **{"lora_target_modules": ["q_proj", "v_proj"], name: value})
    with opened(config) as model:
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ConfigError, match=re.escape(f"{name} is {other!r}, but the adapter was made with")
    ):
        LemaModel.from_pretrained(tmp_path / "adapter", **{name: other})
    again = LemaModel.from_pretrained(tmp_path / "adapter", **{name: value}, lora_dropout=0.5)
    assert again.config == config.model_copy(update={"lora_dropout": 0.5})
    again.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_does_not_go_on_with_another_adapter(llama: Path, name: str, tmp_path: Path) -> None:
    value, other = OTHERS[name]
    base = {"lora_target_modules": ["q_proj", "v_proj"], "lora_rank": 4}
    with opened(settings(llama, tmp_path, **{**base, name: value})) as model:
        trainer = model.get_trainer()
        trainer.train_step(torch.tensor([[5, 6, 7]]))
        trainer.save_checkpoint(tmp_path / "saved")
    with opened(settings(llama, tmp_path, **{**base, name: other})) as model:
        with pytest.raises(
            ConfigError, match=re.escape(f"{name} is {other!r}, but the adapter was made with")
        ) as caught:
            model.get_trainer().load_checkpoint(tmp_path / "saved")
        assert name in caught.value.how
    with opened(settings(llama, tmp_path, **{**base, name: value, "lora_dropout": 0.25})) as model:
        assert model.get_trainer().load_checkpoint(tmp_path / "saved") == {}


def test_what_peft_writes_out_in_full_may_be_asked_for_again_in_short(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path, lora_target_modules="all-linear")) as model:
        model.save_pretrained(tmp_path / "adapter")
        adapted = adapter_of(model.skeleton).keys()
    again = LemaModel.from_pretrained(tmp_path / "adapter", lora_target_modules="all-linear")
    assert adapter_of(again.skeleton).keys() == adapted
    again.close()


def test_an_adapter_saved_by_hand_with_settings_that_clash_is_refused_by_file(
    llama: Path, tmp_path: Path
) -> None:
    config = LoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(llama))
    config.layers_pattern = "layers"  # without layers_to_transform; PEFT would not have made it so
    config.rank_pattern = {"q_proj(": 3}
    config.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match=r"layers_pattern|q_proj\(") as caught:
        LemaModel.from_pretrained(tmp_path, device="cpu")
    assert caught.value.where == str(tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"peft_type": "IA3"}', '{"peft_type": "LORA", "r": ']
)
def test_an_adapter_config_that_is_none_is_refused_by_file(
    llama: Path, text: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError) as caught:
        LemaModel.from_pretrained(tmp_path, device="cpu", model_name_or_path=str(llama))
    assert caught.value.where == str(tmp_path / "adapter_config.json")


@pytest.mark.slow
def test_an_adapter_of_experts_one_by_one_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    # its experts are one tensor now, as its adapter's will be
    checkpoint = write_checkpoint("mixtral", tmp_path)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    generator = torch.Generator().manual_seed(4)
    sizes = {"self_attn.q_proj": (32, 32)}
    for expert in range(4):
        sizes |= {f"block_sparse_moe.experts.{expert}.{name}": (32, 96) for name in ("w1", "w3")}
        sizes[f"block_sparse_moe.experts.{expert}.w2"] = (96, 32)
    tensors = {}
    for layer in range(TINY_LAYERS):
        for name, (size_in, size_out) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, size_in, generator=generator) / 10
            tensors[f"{key}.lora_B.weight"] = torch.randn(size_out, 2, generator=generator) / 10
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "w1", "w2", "w3"], task_type="CAUSAL_LM"
    )
    config.base_model_name_or_path = str(checkpoint.streamed)
    config.save_pretrained(str(tmp_path / "old"))
    save_file(tensors, tmp_path / "old" / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The following rank_pattern keys", category=RuntimeWarning
        )
        warnings.filterwarnings(
            "ignore", message="The following alpha_pattern keys", category=RuntimeWarning
        )
        expected = whole_logits(whole_model(checkpoint.published, tmp_path / "old"), ids)
    model = LemaModel.from_pretrained(
        tmp_path / "old", device="cpu", backend=CpuBackend(poison=True)
    )
    # not bitwise: `lema.model.experts`
    torch.testing.assert_close(found := streamed_logits(model, ids), expected)
    model.save_pretrained(tmp_path / "new")
    model.close()
    again = LemaModel.from_pretrained(tmp_path / "new", device="cpu")
    assert torch.equal(streamed_logits(again, ids), found)
    again.close()


def test_the_revision_of_the_base_model_is_written_and_read(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model:
        save_adapter(model.lora_manager, tmp_path / "adapter", "somebody/a-model", "v2")
    config, _ = read_settings(tmp_path / "adapter")
    assert (config.model_name_or_path, config.revision) == ("somebody/a-model", "v2")
    config, _ = read_settings(tmp_path / "adapter", model_name_or_path=str(llama))
    assert config.revision is None  # a directory has none
