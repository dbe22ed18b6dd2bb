"""A `Modelfile` writes chats as the chat template does, in Go's syntax, or says that it cannot."""

from pathlib import Path
from typing import Any

import pytest
from gotemplates import HAS_GO, render, render_with_go
from smallrun import tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from lema.convert.gguf.gotemplate import go_template
from lema.convert.gguf.modelfile import Modelfile, modelfile_for, stop_words
from lema.convert.gguf.roletexts import NoTable, read_role_texts
from lema.data.templates.named import NAMED, named_template

# Templates that are more than texts around messages.
NOT_TABLES = {
    "mistral_v2v3": "the system message is written into the last question",
    "mistral_v3_tekken": "the system message is written into the last question",
}
WORDS = ("How are you?\n\nWell?", 'Quite "well", {{ thanks }}.', "And \\ you?", "Fine.")
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>"]


def with_template(text: str | None, *, adds_begin: bool = False) -> PreTrainedTokenizerBase:
    opened: Any = tokenizer()
    opened.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIALS[2:]}
    )
    if adds_begin:
        opened._tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", opened.bos_token_id)]
        )
    opened.chat_template = text
    assert isinstance(opened, PreTrainedTokenizerBase)
    return opened


def chats(*, system: bool) -> list[list[tuple[str, str]]]:
    """Chats of one to three questions, and the same with an answer that goes on."""
    before = [("system", "You are a miller.")] if system else []
    roles = ["user", "assistant"] * 3
    return [[*before, *zip(roles[:count], WORDS * 2, strict=False)] for count in range(1, 7)]


def by_jinja(opened: PreTrainedTokenizerBase, chat: list[tuple[str, str]]) -> str:
    """What the chat template makes of a chat; of one that ends with an answer, the question's
    prompt and the words of the answer."""
    answer = chat[-1][1] if chat[-1][0] == "assistant" else ""
    asked = chat[:-1] if answer else chat
    messages = [{"role": role, "content": words} for role, words in asked]
    text = opened.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text) + answer


def all_chats(opened: PreTrainedTokenizerBase) -> list[list[tuple[str, str]]]:
    has_system = read_role_texts(opened).has_system
    return chats(system=False) + (chats(system=True) if has_system else [])


TABLES = sorted(NAMED.keys() - NOT_TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_go_template_writes_what_the_chat_template_does(name: str) -> None:
    opened = with_template(named_template(name))
    written = go_template(read_role_texts(opened))
    for chat in all_chats(opened):
        assert render(written, chat) == by_jinja(opened, chat)


@pytest.mark.skipif(not HAS_GO, reason="Go is not installed")
def test_go_itself_renders_the_same(tmp_path: Path) -> None:
    cases = list[tuple[str, list[tuple[str, str]]]]()
    texts = list[str]()
    for name in TABLES:
        opened = with_template(named_template(name))
        written = go_template(read_role_texts(opened))
        for chat in all_chats(opened):
            cases.append((written, chat))
            texts.append(by_jinja(opened, chat))
    assert render_with_go(cases, tmp_path) == texts
    assert len(cases) >= 6 * len(TABLES)


def test_most_named_templates_have_a_system_message() -> None:
    with_system = [
        name for name in TABLES if read_role_texts(with_template(named_template(name))).has_system
    ]
    assert len(with_system) >= len(TABLES) - 3


@pytest.mark.parametrize("name", NOT_TABLES)
def test_template_that_is_no_table_gives_no_template_and_a_note(name: str) -> None:
    opened = with_template(named_template(name))
    with pytest.raises(NoTable):
        read_role_texts(opened)
    modelfile = modelfile_for(opened, "./model.gguf")
    assert modelfile.template is None
    assert "No TEMPLATE is written" in modelfile.notes[0]
    text = modelfile.text()
    assert 'TEMPLATE "' not in text and "FROM ./model.gguf\n" in text
    assert 'PARAMETER stop "</s>"\n' in text


def test_template_that_changes_words_is_refused() -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content | replace('\n', ' ') }}{% endfor %}"
    with pytest.raises(NoTable, match="changes the words"):
        read_role_texts(with_template(text))


def test_template_that_leaves_a_message_out_is_refused() -> None:
    text = "{% for m in messages[-1:] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(NoTable, match="does not write each message"):
        read_role_texts(with_template(text))


def test_no_template_is_said() -> None:
    modelfile = modelfile_for(with_template(None), "./model.gguf")
    assert modelfile.template is None
    assert "has no chat template" in modelfile.notes[0]


CHATML = named_template("chatml")
BEGUN = "{{ bos_token }}" + str(CHATML)


@pytest.mark.parametrize("adds_begin", [True, False])
def test_token_that_the_tokenizer_adds_is_not_written_twice(adds_begin: bool) -> None:
    opened = with_template(BEGUN, adds_begin=adds_begin)
    chat = chats(system=True)[2]
    written = render(go_template(read_role_texts(opened)), chat)
    expected = by_jinja(opened, chat)
    assert expected.startswith("<s><|im_start|>")
    assert written == (expected.removeprefix("<s>") if adds_begin else expected)


def test_reasoning_that_a_prompt_opens_is_in_no_earlier_answer() -> None:
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
        "{% endif %}"
    )
    opened = with_template(text)
    written = go_template(read_role_texts(opened))
    for chat in all_chats(opened):
        rendered = render(written, chat)
        assert rendered == by_jinja(opened, chat)
        assert rendered.count("<think>") == 1


def test_template_that_trims_is_told_of() -> None:
    trims = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[a]"
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    assert read_role_texts(with_template(trims)).trims
    assert not read_role_texts(with_template(plain)).trims
    assert "blanks" in modelfile_for(with_template(trims), "x").notes[0]
    assert modelfile_for(with_template(plain), "x").notes == ()


def test_date_of_a_template_is_that_of_the_run_and_is_told_of() -> None:
    text = (
        "{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    )
    modelfile = modelfile_for(with_template(text), "x", date="2026-03-04")
    assert modelfile.template is not None
    assert "04 Mar 2026" in render(modelfile.template, [("user", "hello")])
    assert "2026-03-04" in modelfile.notes[0]


def test_stop_words_are_tokens_that_end_texts_or_what_begins_the_next_question() -> None:
    opened = with_template(CHATML)
    end = opened.convert_tokens_to_ids("<|eot_id|>")
    texts = read_role_texts(opened)
    assert stop_words(opened, [end], texts) == ("<|eot_id|>", "<|im_end|>", "</s>")
    worded = with_template(
        "{% for m in messages %}{{ m.role | upper + ': ' + m.content + '\n' }}{% endfor %}ASSISTANT: "
    )
    assert stop_words(worded, [], read_role_texts(worded)) == ("</s>", "USER:")


def test_system_message_is_written_where_the_template_has_one() -> None:
    system = 'You are "the" miller.\nBe short.'
    text = modelfile_for(with_template(CHATML), "./model.gguf", system=system).text()
    assert text.endswith(f'SYSTEM """{system}"""\n')
    without = modelfile_for(with_template(named_template("gemma")), "x", system=system)
    assert without.system is None
    assert any("takes no system message" in note for note in without.notes)


@pytest.mark.parametrize("system", ['a """ b', 'it ends with "quotes"'])
def test_what_cannot_be_quoted_is_left_out_and_told_of(system: str) -> None:
    modelfile = modelfile_for(with_template(CHATML), "x", system=system)
    assert "SYSTEM" not in modelfile.text().partition("FROM")[2]
    assert any("cannot quote" in note for note in modelfile.notes)


def test_modelfile_of_an_adapter_names_both_files() -> None:
    text = Modelfile("./base.gguf", "./adapter.gguf", notes=("One\nline.",)).text()
    assert text == "# One line.\nFROM ./base.gguf\nADAPTER ./adapter.gguf\n"
