"""`lema generate` ends texts where training did, names what a prompt must not hold, and pads
with what there is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from clirun import config_writer, lema, write_rows
from smallrun import SENTENCES, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

END = "@"  # a token of the vocabulary that the base model does not end at
CHAT = [{"role": "user", "content": "corn"}, {"role": "assistant", "content": " by the river"}]
TEMPLATE = "{% for m in messages %}{{ m.content + '@' }}{% endfor %}"


@pytest.fixture
def base(llama: Path, tmp_path: Path) -> Path:
    """A copy of a model, which may be changed."""
    return shutil.copytree(llama, tmp_path / "base")


def results(tmp_path: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Run `lema generate` and return what it wrote."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    assert lema("generate", *arguments, "--output", out) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.slow
def test_what_was_trained_on_chats_stops_as_they_do_and_so_does_what_it_is_merged_to(
    base: Path, tmp_path: Path
) -> None:
    encode = tokenizer()
    encode.add_special_tokens({"additional_special_tokens": [END]})
    encode.chat_template = None
    encode.save_pretrained(base)
    (base / "chat_template.jinja").unlink()
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 8)
    given = {
        "train_data": str(chats),
        "chat_template": TEMPLATE,
        "max_steps": 60,
        "learning_rate": 1e-2,
    }
    config = config_writer(base, tmp_path)(**given, lora_rank=8, batch_size=4, max_grad_norm=1.0)
    assert lema("train", config) == 0
    adapter = tmp_path / "out"
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": CHAT[:1]}])
    asked = ["--prompts", prompts, "--max-new-tokens", 12]
    answer = len(encode(CHAT[1]["content"]).input_ids) + 1
    for where in (adapter, config):
        (found,) = results(tmp_path, where, *asked)
        assert (found["completion_tokens"], found["finish_reason"]) == (answer, "stop"), where
        assert found["completion"] == CHAT[1]["content"]  # special tokens are not shown
    assert lema("merge", adapter, tmp_path / "merged") == 0
    model, words = (
        kind.from_pretrained(tmp_path / "merged") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = words.apply_chat_template(
        CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**inputs, max_new_tokens=12, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert words.decode(made) == CHAT[1]["content"] + END


def test_a_special_token_that_the_settings_of_generation_name_ends_a_text_unseen(
    base: Path, tmp_path: Path
) -> None:
    config = config_writer(base, tmp_path)()
    asked = ["-p", SENTENCES[0], "--max-new-tokens", 6]
    encode = AutoTokenizer.from_pretrained(base)
    whole = AutoModelForCausalLM.from_pretrained(base)
    inputs = encode(SENTENCES[0], return_tensors="pt", return_token_type_ids=False)
    made = whole.generate(**inputs, max_new_tokens=6, do_sample=False)
    ids = made[0, inputs["input_ids"].shape[1] :].tolist()
    (free,) = results(tmp_path, config, *asked)
    assert (free["completion"], free["finish_reason"]) == (encode.decode(ids), "length")
    end = ids[2]
    encode.add_special_tokens({"additional_special_tokens": [encode.convert_ids_to_tokens(end)]})
    encode.save_pretrained(base)
    edit(base / "generation_config.json", eos_token_id=[0, end])
    (found,) = results(tmp_path, config, *asked)
    length = ids.index(end) + 1
    assert (found["completion_tokens"], found["finish_reason"]) == (length, "stop")
    assert found["completion"] == encode.decode(ids[: length - 1])


@pytest.mark.parametrize("prompts", [True, False], ids=["a file", "arguments"])
def test_a_token_that_the_model_has_no_row_for_is_named(
    base: Path, tmp_path: Path, prompts: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    encode = AutoTokenizer.from_pretrained(base)
    encode.add_tokens(["<call>"], special_tokens=True)
    encode.save_pretrained(base)
    texts = ["the miller", "corn <call>"]
    file = write_rows(tmp_path / "prompts.txt", [{"text": text} for text in texts])
    asked = ["--prompts", file] if prompts else ["-p", texts[0], "-p", texts[1]]
    assert lema("generate", config_writer(base, tmp_path)(), *asked, "--max-new-tokens", 2) == 3
    said = capfd.readouterr().err
    number = len(tokenizer())
    place = len(tokenizer()("corn ").input_ids)
    assert f"the prompt holds {number}, which is outside the vocabulary of {number} tokens" in said
    assert f"{file if prompts else '--prompt'}:2, position {place}" in said


@pytest.mark.parametrize("pad", [-1, 300], ids=["-1", "the first that there is not"])
def test_a_pad_token_that_the_model_does_not_have_changes_no_text(
    base: Path, tmp_path: Path, pad: int
) -> None:
    config = config_writer(base, tmp_path)()
    prompts = write_rows(
        tmp_path / "prompts.txt", [{"text": text} for text in ("corn", SENTENCES[0], "the miller")]
    )
    asked = ["--prompts", prompts, "--max-new-tokens", 5, "--batch-size", 3]
    expected = results(tmp_path, config, *asked)
    edit(base / "generation_config.json", pad_token_id=pad)
    if pad < 0:  # transformers itself refuses a larger one than there are rows
        edit(base / "config.json", pad_token_id=pad)
    encode = AutoTokenizer.from_pretrained(base)
    encode.add_special_tokens({"pad_token": "<pad>"})
    assert encode.pad_token_id == len(tokenizer())
    encode.save_pretrained(base)
    assert results(tmp_path, config, *asked) == expected
