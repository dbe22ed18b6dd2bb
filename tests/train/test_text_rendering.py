"""Texts end and are written as they were trained: beside the adapter, when it is opened, and
after a merge.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import VOCABULARY, settings, tokenizer, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lema import LemaConfig, LemaModel
from lema.convert import merge_adapter
from lema.data.chat.stop_tokens import stop_tokens_of
from lema.lora.consent import save_settings
from lema.storage.rendering import carry_rendering, read_templates, write_templates
from lema.train.run import train

CHAT = [
    {"role": "user", "content": "the miller of"},
    {"role": "assistant", "content": "corn and the river"},
]
END = "@"  # a token of the vocabulary that the base model does not end at
TEMPLATE = "{% for m in messages %}{{ m.content + '@' }}{% endfor %}"
OWN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A base model, the directory of an adapter trained on chats with a template of the
    settings, and its end token.
    """
    place = tmp_path_factory.mktemp("rendering")
    base = write_model(place / "model")
    encode = tokenizer()
    encode.chat_template = {"default": OWN, "tool_use": OWN}
    end = encode.convert_tokens_to_ids(END)
    encode.add_special_tokens({"additional_special_tokens": [END]})
    encode.save_pretrained(base)
    data = place / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(4)))
    config = settings(
        base,
        place / "run",
        train_data=str(data),
        chat_template=TEMPLATE,
        max_steps=2,
        save_steps=2,
        batch_size=2,
    )
    train(config)
    return base, Path(config.output_dir), end


def test_a_model_without_settings_of_generation_gets_some(
    trained: tuple[Path, Path, int], tmp_path: Path
) -> None:
    base, _, end = trained
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    (bare / "generation_config.json").unlink()
    out = tmp_path / "run"
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    data = {"train_data": str(tmp_path / "chats.jsonl"), "chat_template": TEMPLATE}
    train(settings(bare, out, **data, max_steps=1, save_steps=1, batch_size=1))
    merged = merge_adapter(out, tmp_path / "merged")
    own = GenerationConfig.from_model_config(AutoConfig.from_pretrained(bare)).eos_token_id
    for directory in (out, out / "checkpoint-1", merged):
        assert ends_in(directory) == [own, end], directory


def ends_in(directory: Path) -> list[int]:
    found: Any = GenerationConfig.from_pretrained(directory).eos_token_id
    return found if isinstance(found, list) else [found]


def test_an_adapter_its_checkpoint_and_the_merged_model_render_and_end_as_the_texts(
    trained: tuple[Path, Path, int], tmp_path: Path
) -> None:
    base, adapter, end = trained
    merged = merge_adapter(adapter, tmp_path / "merged")
    for directory in (adapter, adapter / "checkpoint-2", merged):
        assert read_templates(directory) == TEMPLATE, directory
        assert end in ends_in(directory), directory
    assert AutoTokenizer.from_pretrained(merged).chat_template == TEMPLATE
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert read_templates(base) == {"default": OWN, "tool_use": OWN}  # the base is as it was


def test_an_opened_adapter_keeps_both_though_the_settings_name_a_file_that_is_gone(
    trained: tuple[Path, Path, int], tmp_path: Path
) -> None:
    _, adapter, end = trained
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    said = json.loads((copy / "lema_config.json").read_text())
    save_settings(LemaConfig(**said | {"chat_template": "gone.jinja"}), copy)
    with closing(LemaModel.from_pretrained(copy)) as model:
        assert model.tokenizer.chat_template == TEMPLATE
        own = model.files.generation_config()
        assert own is not None and end in own.eos_token_id
        model.save_pretrained(tmp_path / "again")
    assert read_templates(tmp_path / "again") == TEMPLATE
    assert end in ends_in(tmp_path / "again")
    with closing(LemaModel.from_pretrained(copy, chat_template=OWN)) as model:
        assert model.tokenizer.chat_template == OWN


def test_a_merge_without_a_template_of_the_adapter_keeps_every_template_of_the_model(
    trained: tuple[Path, Path, int], tmp_path: Path
) -> None:
    _, adapter, _ = trained
    bare = tmp_path / "bare"
    shutil.copytree(adapter, bare)
    for name in ("chat_template.jinja", "generation_config.json"):
        (bare / name).unlink()
    assert read_templates(merge_adapter(bare, tmp_path / "merged")) == {
        "default": OWN,
        "tool_use": OWN,
    }


def test_templates_of_an_adapter_take_the_place_of_all_others(tmp_path: Path) -> None:
    source = tmp_path / "source"
    out = tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (out / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": OWN})
    )
    assert read_templates(out) == OWN
    carry_rendering(source, out)
    assert read_templates(out) == OWN
    write_templates(source, {"default": TEMPLATE, "tool_use": OWN})
    carry_rendering(source, out)
    assert read_templates(out) == {"default": TEMPLATE, "tool_use": OWN}
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    write_templates(out, TEMPLATE)
    assert read_templates(out) == TEMPLATE and not (out / "additional_chat_templates").exists()


def test_ends_are_special_tokens_that_are_trained_at_the_end_of_whole_rows() -> None:
    encode = tokenizer()
    encode.add_special_tokens({"additional_special_tokens": ["@", "#"]})
    turn, tool, word = (encode.convert_tokens_to_ids(text) for text in ("@", "#", "c"))

    def row(ids: list[int], trained: int) -> dict[str, list[int]]:
        return {
            "input_ids": ids,
            "labels": [-100] * (len(ids) - trained) + ids[len(ids) - trained :],
        }

    assert stop_tokens_of(
        [row([word, word, turn], 2), row([word, tool], 1), row([word, turn], 1)], encode
    ) == (
        turn,
        tool,
    )
    assert stop_tokens_of([row([word, turn, word], 2)], encode) == ()  # within an answer
    unlearnt = {"input_ids": [word, word, turn], "labels": [-100, word, -100]}
    assert stop_tokens_of([unlearnt], encode) == ()


def test_texts_end_where_a_named_template_ends_a_turn(tmp_path: Path) -> None:
    """Though neither the model nor its tokenizer says that the token ends anything."""
    base = write_model(tmp_path / "model", vocab_size=VOCABULARY + 1)
    encode = tokenizer()
    assert len(encode) == VOCABULARY
    encode.add_tokens(["<|im_end|>"])
    encode.save_pretrained(base)
    weights = AutoModelForCausalLM.from_pretrained(base)
    prompt = encode(["the miller"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        likeliest = int(weights(prompt).logits[0, -1].argmax())
        weights.lm_head.weight[VOCABULARY] = 2 * weights.lm_head.weight[likeliest]
    weights.save_pretrained(base)
    lengths = []
    for template in (None, "chatml"):
        changes = {} if template is None else {"chat_template": template}
        with closing(LemaModel(settings(base, tmp_path / "run", **changes))) as model:
            (text,) = model.generate("the miller", max_new_tokens=5, do_sample=False)
            lengths.append(len(encode(text)["input_ids"]))
    assert lengths == [5, 1]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    data = {"train_data": str(tmp_path / "chats.jsonl"), "chat_template": "chatml"}
    train(settings(base, tmp_path / "run", **data, max_steps=1, batch_size=1))
    assert VOCABULARY in ends_in(tmp_path / "run")
