"""A chat template that writes the day's date: a run keeps the date of its first start, and the
data say what it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from days import set_day
from smallrun import settings, tokenizer, write_model

from lema.data import Forms, prepare_data
from lema.data.preference import prepare_preferences
from lema.errors import ConfigError
from lema.train.checkpoint.format import checkpoints
from lema.train.checkpoint.resume import settings_then
from lema.train.run import train

TEMPLATE = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content + '@' }}{% endfor %}"
QUESTION = {"role": "user", "content": "the miller of"}
ANSWER = {"role": "assistant", "content": "corn and the river"}


def dated_tokenizer(template: str = TEMPLATE) -> Any:
    encode = tokenizer()
    encode.chat_template = template
    return encode


def test_rows_have_the_date_that_is_given_and_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    set_day(monkeypatch, "2026-11-28")
    encode = dated_tokenizer()
    rows = [{"messages": [QUESTION, ANSWER]}]
    pair = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "corn"}]}
    for date, shown in ((None, "28"), ("2026-03-07", "07")):
        data = prepare_data(rows, encode, max_length=64, forms=Forms(template_date=date))
        assert encode.decode(data[0]["input_ids"]).startswith(f"{shown}the miller of")
        said = f"the chat template writes the day's date, here {date or '2026-11-28'}; a run keeps"
        assert said in data.notes[0]
        pairs = prepare_preferences(
            [pair], encode, labelled=False, max_length=64, forms=Forms(template_date=date)
        )
        assert encode.decode(pairs[0][0]["input_ids"]).startswith(f"{shown}the miller of")
        assert said in pairs.notes[0]
    timeless = dated_tokenizer(TEMPLATE.replace("{{ strftime_now('%d') }}", ""))
    assert not prepare_data(
        rows, timeless, max_length=64, forms=Forms(template_date="2026-03-07")
    ).notes


def test_a_template_that_marks_answers_is_told_the_date_too() -> None:
    marked = (
        "{{ strftime_now('%d') }}{% for m in messages %}{% if m.role == 'assistant' %}{% "
        "generation %}"
    )
    marked += (
        "{{ m.content + '@' }}{% endgeneration %}{% else %}{{ m.content + '@' }}{% endif %}{% "
        "endfor %}"
    )
    encode = dated_tokenizer(marked)
    rows = [{"messages": [QUESTION, ANSWER]}]
    forms = Forms(template_date="2026-03-07")
    assert encode.decode(
        prepare_data(rows, encode, max_length=64, forms=forms)[0]["input_ids"]
    ).startswith("07the")


def test_a_run_over_midnight_resumes_with_the_date_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_model(tmp_path / "model")
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n" for _ in range(4)))
    given = {"train_data": str(data), "chat_template": TEMPLATE, "save_steps": 1, "batch_size": 2}
    set_day(monkeypatch, "2026-11-28")
    config = settings(base, tmp_path / "run", max_steps=1, **given)
    train(config)
    (first,) = checkpoints(Path(config.output_dir))
    assert settings_then(first)["template_date"] == "2026-11-28"
    set_day(monkeypatch, "2026-11-29")
    train(settings(base, tmp_path / "run", max_steps=2, **given), resume=True)
    newest = checkpoints(Path(config.output_dir))[-1]
    assert newest != first and settings_then(newest)["template_date"] == "2026-11-28"
    with pytest.raises(ConfigError, match="template_date: '2026-11-28' -> '2026-11-29'"):
        train(
            settings(base, tmp_path / "run", max_steps=3, template_date="2026-11-29", **given),
            resume=True,
        )


def test_a_date_is_a_day(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a date such as 2026-03-31, not 'tomorrow'"):
        settings(tmp_path, tmp_path, template_date="tomorrow")
