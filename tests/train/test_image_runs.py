"""Runs on rows with images: what a user types, every step as the whole model makes it, resumption,
and what stays in memory.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from clirun import lema
from forked import run_program
from imageprocessors import image_examples, image_rows, picture, publish_with_processor, words
from parity import trained
from peft import get_peft_model
from PIL import Image
from publishedclass import published_class
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, TrainerCallback, get_scheduler

from lema import LemaConfig, LemaModel
from lema.data.images import decoder
from lema.data.images.processor import ImageProcessor
from lema.model.files import read_data
from lema.plan import make_plan
from lema.plan.machine import profile
from lema.storage.modelfiles import load_processor
from lema.train.sampler import StepSampler

LANGUAGE = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|down_proj)"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_with_processor("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")


def written(folder: Path, model: Path, rows: Rows, **changes: Any) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "model_name_or_path": str(model),
        "device": "cpu",
        "modalities": "all",
        "lora_target_modules": LANGUAGE,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "train_data": str(data),
        "output_dir": str(folder / "out"),
        "batch_size": 4,
        "micro_batch_size": 3,
        "max_length": 64,
        "save_steps": 0,
        "logging_steps": 1,
    }
    return given | changes


def adapter_of(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(directory / "adapter_model.safetensors")
    return tensors


@contextmanager
def opened(settings: dict[str, Any]) -> Iterator[LemaModel]:
    model = LemaModel(LemaConfig(**settings))
    try:
        model.initialize_lora()
        yield model
    finally:
        model.close()


def test_every_step_of_two_epochs_is_that_of_the_whole_model(model: Path, tmp_path: Path) -> None:
    rows = image_rows(tmp_path, 10)
    about = written(tmp_path, model, rows, gradient_accumulation_steps=2, num_train_epochs=2)
    with opened(about) as streamed:
        config = streamed.config
        adapter = streamed.lora_manager
        assert adapter is not None
        kind = published_class(AutoConfig.from_pretrained(model))
        base = aligned(kind.from_pretrained(model, dtype=torch.float32))
        torch.manual_seed(config.seed)
        whole: Any = get_peft_model(base, adapter.peft_config["default"]).train()
        own = trained(adapter)
        assert all(torch.equal(own[name], one) for name, one in trained(whole).items())
        data = read_data(config, streamed.files, config.train_data)
        streamed.get_trainer().fit(data, say=lambda _: None)
        sampler = StepSampler(data, config, streamed.backend.replicas, streamed.adapter.padding)
        found = {name: one.detach().clone() for name, one in own.items()}
    processor: Any = load_processor(model, trusted=False)
    parameters = [*trained(whole).values()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, 0, sampler.num_steps)
    assert sampler.num_steps == 3
    for step in range(sampler.num_steps):
        groups = sampler._batches.groups(sampler._of(step))
        total = sum(
            int((torch.tensor(data[n]["labels"])[1:] != -100).sum()) for g in groups for n in g
        )
        for numbers in groups:
            texts = [
                processor.apply_chat_template(rows[number]["messages"], tokenize=False)
                for number in numbers
            ]
            images = [
                [Image.open(tmp_path / name) for name in rows[number]["images"]]
                for number in numbers
            ]
            inputs = processor(
                text=texts,
                images=images if any(images) else None,
                padding=True,
                padding_side="right",
                add_special_tokens=False,
                return_tensors="pt",
            )
            width = inputs["input_ids"].shape[1]
            labels = torch.stack(
                [
                    pad(
                        one := torch.tensor(data[number]["labels"]),
                        (0, width - len(one)),
                        value=-100,
                    )
                    for number in numbers
                ]
            )
            logits = whole(**inputs).logits
            targets = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
            summed = cross_entropy(logits.view(-1, logits.shape[-1]), targets, reduction="sum")
            (summed / total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert all(torch.equal(found[name], one) for name, one in trained(whole).items())


class Killed(TrainerCallback):
    """Ends the process, as far as a test can, at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("towers", ["device", "stream"])
def test_a_run_that_was_killed_ends_bitwise_where_the_other_does(
    model: Path, towers: str, tmp_path: Path
) -> None:
    about = written(
        tmp_path,
        model,
        image_rows(tmp_path, 10),
        num_train_epochs=2,
        lora_dropout=0.1,
        eval_split=2,
        save_steps=1,
        towers=towers,
    )

    def run(name: str, *callbacks: Any, resume: bool = False) -> dict[str, Tensor]:
        directory = tmp_path / name
        with opened({**about, "output_dir": str(directory)}) as streamed:
            data, held_back = read_data(
                streamed.config, streamed.files, streamed.config.train_data
            ).split(2, 42)
            trainer = streamed.get_trainer(callbacks=callbacks)
            trainer.fit(data, held_back, resume=resume, say=lambda _: None)
        return adapter_of(directory)

    expected = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", Killed(3))
    found = run("killed", resume=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_second_epoch_and_a_second_run_read_no_tower(
    model: Path, towers: str, objective: str, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path, 6) if objective == "sft" else image_examples(tmp_path, 4)
    kept = {"tower_cache": str(tmp_path / "cache"), "towers": towers}
    about = written(tmp_path, model, rows, num_train_epochs=2, objective=objective)
    num_images = sum(len(row["images"]) for row in rows)

    def run(name: str, **settings: Any) -> tuple[dict[str, Tensor], Any]:
        directory = tmp_path / name
        with opened({**about, **settings, "output_dir": str(directory)}) as streamed:
            data = read_data(streamed.config, streamed.files, streamed.config.train_data)
            streamed.get_trainer().fit(data, say=lambda _: None)
            outer = streamed.outer
            return adapter_of(directory), outer.cached_towers

    plain, _ = run("plain", towers=towers)
    first, of_first = run("first", **kept)
    second, of_second = run("second", **kept)
    assert of_first.loaded and of_first.store.misses == num_images
    assert of_first.store.hits > 0
    assert not of_second.loaded and of_second.store.misses == 0
    assert all(torch.equal(second[name], one) for name, one in first.items())
    assert all(torch.allclose(plain[name], one, atol=1e-5) for name, one in first.items())


@pytest.mark.parametrize("modalities", ["text", "all"])
def test_a_plan_says_what_of_towers_it_does_not_count(model: Path, modalities: Any) -> None:
    config = LemaConfig(str(model), device="cpu", modalities=modalities, max_length=64)
    plan, _ = make_plan(config, profile("4090"))
    said = any("what towers compute is not counted" in note for note in plan.notes)
    assert said == (modalities == "all")


def test_a_resumed_run_refuses_an_image_that_has_changed(model: Path, tmp_path: Path) -> None:
    about = written(tmp_path, model, image_rows(tmp_path, 6), save_steps=1, num_train_epochs=2)

    def run(*callbacks: Any, resume: bool = False) -> None:
        with opened(about) as streamed:
            trainer = streamed.get_trainer(callbacks=callbacks)
            trainer.fit(streamed.config.train_data, resume=resume, say=lambda _: None)

    with pytest.raises(KeyboardInterrupt):
        run(Killed(1))
    picture(99).save(tmp_path / "1_0.png")
    with pytest.raises(Exception, match="data") as refused:
        run(resume=True)
    assert type(refused.value).__name__ == "ConfigError"


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_a_yaml_is_enough(
    model: Path, objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        image_rows(tmp_path, 8)
        if objective == "sft"
        else image_examples(tmp_path, 8, labelled=objective == "kto")
    )
    file = tmp_path / "run.yaml"
    about = written(tmp_path, model, rows, objective=objective, eval_split=2, num_train_epochs=2)
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(about, out)
    for verb in ("plan", "train"):
        assert lema(verb, str(file)) == 0, capsys.readouterr().err
    before = adapter_of(tmp_path / "out")
    assert any(bool(one.any()) for name, one in before.items() if "lora_B" in name)
    logged = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert any("eval_loss" in line for line in logged)


def test_data_shows_where_images_stand(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(written(tmp_path, model, image_rows(tmp_path, 6)), out)
    assert lema("data", str(file), "--rows", "2") == 0
    shown = capsys.readouterr().out
    assert "6 images with 36 tokens, at most 6 each; the largest has 40 x 45 pixels" in shown
    assert "<images, image 1: 0_0.png, 40 x 30, 6 tokens>" in shown
    assert shown.count("6 tokens>") == 3  # one image in the first row, two in the second
    assert lema("data", str(file), "--rows", "2", "--json") == 0
    about = json.loads(capsys.readouterr().out)
    sizes = {"longest": 6, "largest": [40, 45], "seconds": None}
    assert about["images"] == {"number": 6, "kinds": {"image": 6}, "tokens": 36, **sizes}
    (image,) = about["first"][0]["images"]
    assert image["size"] == [40, 30]
    assert [token["id"] for token in about["first"][0]["tokens"]][image["first"] :][:6] == [90] * 6


def live(
    model: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, int]:
    """Train two steps; return how many images were decoded, and the most images and bytes of pixels
    that were there at once."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}]},
                {"role": "assistant", "content": words(number, 4)},
            ],
            "images": ["one.png"],
        }
        for number in range(count)
    ]
    picture(1).save(tmp_path / "one.png")
    images: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    pixels: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    most = [0, 0, 0]
    decode = decoder.decoded
    process = ImageProcessor.inputs

    def decoded(content: bytes, max_pixels: int) -> Any:
        image = decode(content, max_pixels)
        images[id(image)] = image
        most[0] += 1
        most[1] = max(most[1], len(images))
        return image

    def inputs(self: ImageProcessor, *given: Any) -> dict[str, Tensor]:
        made = process(self, *given)
        pixels[id(made["pixel_values"])] = made["pixel_values"]
        most[2] = max(most[2], sum(one.nbytes for one in pixels.values()))
        return made

    with monkeypatch.context() as patched:
        patched.setattr(decoder, "decoded", decoded)
        patched.setattr(ImageProcessor, "inputs", inputs)
        about = written(tmp_path, model, rows, batch_size=8, micro_batch_size=2, max_steps=2)
        about["overwrite_output_dir"] = True
        with opened(about) as streamed:
            streamed.get_trainer().fit(streamed.config.train_data, say=lambda _: None)
    return most[0], most[1], most[2]


def test_memory_does_not_grow_with_the_number_of_images(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, images_of_few, pixels_of_few = live(model, tmp_path, 16, monkeypatch)
    many, images_of_many, pixels_of_many = live(model, tmp_path, 1000, monkeypatch)
    assert few == 16 + 2 * 8
    assert many == 1000 + 2 * 8
    assert images_of_many == images_of_few <= 2  # those of a micro-batch
    assert pixels_of_many == pixels_of_few > 0


ROOT = Path(__file__).parents[2]


def with_model(text: str, model: Path) -> str:
    """Return settings for a small model in the place of theirs."""
    text = text.replace("Qwen/Qwen3-VL-8B-Instruct", str(model))
    return text.replace("max_length: 4096", "max_length: 64").replace("0.02", "0.25")


def test_the_rows_of_the_page_train_with_its_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- images rows -->\n```yaml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name, settings in (
        ("page.yaml", text),
        ("config.yaml", (ROOT / "configs" / "lora_images.yaml").read_text(encoding="utf-8")),
    ):
        Path("data").mkdir(exist_ok=True)
        rows = image_rows(Path("data"), 8)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path("data/photos.jsonl").write_text(lines)
        Path(name).write_text(with_model(settings, model))
        options = ["--set", "device=cpu", "--set", f"output_dir=out-{name}"]
        assert lema("train", name, *options) == 0, capsys.readouterr().err
        assert (Path(f"out-{name}") / "adapter_model.safetensors").is_file()


def test_init_sees_that_rows_have_images(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, model, image_rows(tmp_path, 6))
    file = tmp_path / "made.yaml"
    given = ["--data", str(tmp_path / "rows.jsonl"), "--output", str(file)]
    assert lema("init", str(model), *given) == 0, capsys.readouterr().err
    assert "\nmodalities: all\n" in file.read_text()
    options = ["--set", "max_steps=1", "--set", f"output_dir={tmp_path / 'made'}"]
    assert lema("train", str(file), *options, "--set", "device=cpu") == 0, capsys.readouterr().err


def test_two_processes_share_the_rows_of_a_batch(model: Path, tmp_path: Path) -> None:
    rows = image_rows(tmp_path, 8)
    outcomes = []
    for name, count in (("one", 1), ("two", 2)):
        about = written(tmp_path, model, rows, output_dir=str(tmp_path / name), micro_batch_size=2)
        file = tmp_path / f"{name}.yaml"
        with file.open("w") as out:
            YAML(typ="safe", pure=True).dump(about, out)
        said = tmp_path / f"said {name}"
        said.mkdir()
        ended = run_program(["-m", "lema", "train", str(file)], count, said)
        assert ended.returncode == 0, ended.stderr[-3000:]
        outcomes.append(adapter_of(tmp_path / name))
    one, two = outcomes
    assert all(torch.allclose(two[name], one[name], rtol=0, atol=1e-6) for name in one)
