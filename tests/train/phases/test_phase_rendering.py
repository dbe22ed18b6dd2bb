"""What phases leave, models, deltas and adapters, renders and ends its texts as those that it
was trained on.
"""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from days import set_day
from phaseruns import assert_same
from rich.console import Console
from smallrun import CHAT_TEMPLATE, tokenizer, write_model
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback

from lema import LemaModel
from lema.convert import apply_delta, merge_adapter
from lema.errors import ConfigError
from lema.storage.rendering import read_templates
from lema.train.checkpoint.resume import settings_then
from lema.train.phases.file import read_phase_file
from lema.train.phases.loratrainer import LoRATrainer
from lema.train.phases.run import train_phases

END = "@"
LATER = "#"  # tokens of the vocabulary that the base model does not end at
TEMPLATE = "{% for m in messages %}{{ m.content + '@' }}{% endfor %}"
FULL = {"trains": "full", "tokens": 64, "learning_rate": 1e-3}
LORA = {"trains": "lora", "tokens": 64, "learning_rate": 1e-2, "lora_rank": 2}

Edit = Callable[[Path], None]


def as_published(model: Path) -> None:
    assert (model / "generation_config.json").is_file() and read_templates(model) == CHAT_TEMPLATE


def without_settings_of_generation(model: Path) -> None:
    (model / "generation_config.json").unlink()


def with_two_ends(model: Path) -> None:
    file = model / "generation_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"eos_token_id": [0, 7], "top_k": 3, "do_sample": True}
        )
    )


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert read_templates(model) is None


BASES: dict[str, tuple[Edit, list[int]]] = {
    "as published": (as_published, [0]),
    "without settings of generation": (without_settings_of_generation, [0]),
    "two ends": (with_two_ends, [0, 7]),
    "a tokenizer without a template": (without_template, [0]),
}


def base_of(place: Path, edit: Edit) -> Path:
    """Write a model whose tokenizer has two special tokens more than ends."""
    base = write_model(place / "base")
    encode = tokenizer()
    encode.add_special_tokens({"additional_special_tokens": [END, LATER]})
    encode.save_pretrained(base)
    edit(base)
    return base


def number_of(token: str) -> int:
    found: Any = tokenizer().convert_tokens_to_ids(token)
    return int(found)


def run_file(place: Path, base: Path, *phases: dict[str, Any], **settings: Any) -> Path:
    """Write a file of phases whose first reads chats, and whose second, if any, tokens that end
    otherwise.
    """
    chat = [
        {"role": "user", "content": "the miller of"},
        {"role": "assistant", "content": "corn and the river"},
    ]
    (place / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    ids = tokenizer()(f"the miller of corn{LATER}").input_ids
    (place / "tokens.jsonl").write_text((json.dumps({"input_ids": ids, "labels": ids}) + "\n") * 8)
    data = {"chats": str(place / "chats.jsonl"), "tokens": str(place / "tokens.jsonl")}
    given = {
        "model_name_or_path": str(base),
        "device": "cpu",
        "output_dir": str(place / "out"),
        "save_steps": 0,
    }
    given |= {"train_data": data, "batch_size": 4, "max_length": 16, "chat_template": TEMPLATE}
    named = [
        {**phase, "name": f"phase{index}", "mixture": [{"name": name, "rate": 1.0}]}
        for index, (phase, name) in enumerate(zip(phases, data, strict=False))
    ]
    (place / "run.yaml").write_text(json.dumps(given | settings | {"phases": named}))
    return place / "run.yaml"


def run(file: Path, **options: Any) -> Path:
    return train_phases(read_phase_file(file), console=Console(quiet=True), **options)


def ends_of_model(directory: Path) -> list[int]:
    found: Any = GenerationConfig.from_pretrained(directory).eos_token_id
    return found if isinstance(found, list) else [found]


def assert_says(directory: Path, ends: list[int], template: str | None = TEMPLATE) -> None:
    """What others open a model with says how its texts are written and end."""
    assert ends_of_model(directory) == ends
    assert AutoTokenizer.from_pretrained(directory).chat_template == template


def files(directory: Path) -> dict[str, bytes]:
    """What is in a directory, but for the list of what is."""
    return {
        file.name: file.read_bytes() for file in directory.iterdir() if file.name != "manifest.json"
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BASES)
def test_weights_that_train_leave_a_model_and_a_delta_that_say_the_same(
    name: str, tmp_path: Path
) -> None:
    edit, ends = BASES[name]
    base = base_of(tmp_path, edit)
    before = files(base)
    run(run_file(tmp_path, base, FULL))
    model = tmp_path / "out" / "phase0" / "model"
    assert_says(model, [*ends, number_of(END)])
    place = tmp_path / "again"
    place.mkdir()
    run(run_file(place, base, {**FULL, "save": "delta"}))
    applied = apply_delta(place / "out" / "phase0" / "delta", tmp_path / "applied")
    assert files(applied) == files(model)
    if name == "two ends":
        assert GenerationConfig.from_pretrained(applied).top_k == 3
    assert files(base) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BASES)
def test_adapters_after_weights_end_as_both_and_so_does_what_they_are_merged_to(
    name: str, tmp_path: Path
) -> None:
    edit, ends = BASES[name]
    base = base_of(tmp_path, edit)
    run(run_file(tmp_path, base, FULL, LORA))
    expected = [*ends, number_of(END), number_of(LATER)]
    assert_says(tmp_path / "out" / "phase0" / "model", expected[:-1])
    for adapter in (tmp_path / "out", *sorted((tmp_path / "out" / "phase1").glob("checkpoint-*"))):
        with closing(LemaModel.from_pretrained(adapter)) as model:
            assert model.tokenizer.chat_template == TEMPLATE
            settings: Any = model.files.generation_config()
            assert settings.eos_token_id == expected
    assert_says(merge_adapter(tmp_path / "out", tmp_path / "merged"), expected)


def test_adapters_of_two_phases_end_as_the_texts_of_both(tmp_path: Path) -> None:
    base = base_of(tmp_path, as_published)
    run(run_file(tmp_path, base, LORA, LORA))
    expected = [0, number_of(END), number_of(LATER)]
    assert ends_of_model(tmp_path / "out") == expected
    assert read_templates(tmp_path / "out") == TEMPLATE
    assert_says(merge_adapter(tmp_path / "out", tmp_path / "merged"), expected)


def test_adapters_that_are_merged_between_phases_leave_a_model_that_ends_so(tmp_path: Path) -> None:
    base = base_of(tmp_path, as_published)
    run(run_file(tmp_path, base, LORA, {**LORA, "merge": True}))
    assert_says(tmp_path / "out" / "phase0" / "model", [0, number_of(END)])
    assert_says(
        merge_adapter(tmp_path / "out", tmp_path / "merged"), [0, number_of(END), number_of(LATER)]
    )


class Crash(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:  # the first of the second phase
            raise KeyboardInterrupt


def test_phases_that_were_stopped_in_between_end_as_those_that_were_not(tmp_path: Path) -> None:
    """The process that goes on has not trained the first phase, but the adapter has."""
    file = run_file(tmp_path, base_of(tmp_path, as_published), LORA, LORA, save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        run(file, callbacks=[Crash()])
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    run(file, resume=True)
    assert ends_of_model(tmp_path / "out") == [0, number_of(END), number_of(LATER)]
    assert read_templates(tmp_path / "out") == TEMPLATE


def test_texts_without_a_template_leave_the_model_without_one(tmp_path: Path) -> None:
    base = base_of(tmp_path, without_template)
    file = run_file(tmp_path, base, FULL)
    said = json.loads(file.read_text())
    said["train_data"]["chats"] = str(tmp_path / "texts.jsonl")
    (tmp_path / "texts.jsonl").write_text(
        (json.dumps({"prompt": "the miller", "completion": " of corn"}) + "\n") * 8
    )
    del said["chat_template"]
    file.write_text(json.dumps(said))
    run(file)
    assert_says(tmp_path / "out" / "phase0" / "model", [0], template=None)


def test_trainer_of_stages_goes_on_the_next_day_with_the_date_of_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_file(tmp_path, base_of(tmp_path, as_published), LORA)
    template = "{{ strftime_now('%d') }}" + TEMPLATE
    read = read_phase_file(file, chat_template=template, save_steps=1)
    plan = read.plan.model_copy(
        update={"phases": [read.plan.phases[0].model_copy(update={"tokens": 128})]}
    )

    def trainer(*callbacks: TrainerCallback, **changes: Any) -> LoRATrainer:
        config = read.config.model_copy(update=changes)
        return LoRATrainer(
            plan, config, {"chats": str(tmp_path / "chats.jsonl")}, callbacks=callbacks
        )

    set_day(monkeypatch, "2026-11-28")
    with pytest.raises(KeyboardInterrupt):
        trainer(Crash()).train()
    set_day(monkeypatch, "2026-11-29")
    end = trainer().train(resume=True)
    assert settings_then(end)["template_date"] == "2026-11-28"
    # In another directory the date is the user's to give.
    elsewhere = trainer(output_dir=str(tmp_path / "elsewhere"))
    elsewhere.restore_from_path(end.parent / "checkpoint-1")
    with pytest.raises(ConfigError, match="template_date: '2026-11-28' -> '2026-11-29'"):
        elsewhere.train()
    told = trainer(output_dir=str(tmp_path / "told"), template_date="2026-11-28")
    told.restore_from_path(end.parent / "checkpoint-1")
    assert_same(told.train(), end)
