"""Chat templates by name write the published formats, and a model stops where they end a turn."""

import pytest

from lema import LemaConfig
from lema.data import prepare_data
from lema.data.chat.stop_tokens import stop_tokens_of
from lema.data.forms import forms_of
from lema.data.templates.named import EOS, NAMED, end_token, named_template
from lema.errors import DataError

SYSTEM = {"role": "system", "content": "be kind"}
TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
]
RENDERED = {
    "chatml": "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    "falcon_h1": "<s><|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    "qwen25": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    "qwen3": "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    "b<|im_end|>\n",
    "llama2": "<s>[INST] a? [/INST] b </s>",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\na?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>",
    "gemma": "<s><start_of_turn>user\na?<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
    "gemma3": "<s><start_of_turn>user\na?<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
    "mistral_v1": "<s> [INST] a? [/INST] b</s>",
    "mistral_v2v3": "<s>[INST] a?[/INST] b</s>",
    "mistral_v3_tekken": "<s>[INST]a?[/INST]b</s>",
    "mistral_v7": "<s>[INST]a?[/INST]b</s>",
    "phi_3": "<s><|user|>\na?<|end|>\n<|assistant|>\nb<|end|>\n",
    "phi_35": "<|user|>\na?<|end|>\n<|assistant|>\nb<|end|>\n",
    "phi_4": "<|im_start|>user<|im_sep|>a?<|im_end|><|im_start|>assistant<|im_sep|>b<|im_end|>",
    "phi_4_mini": "<|user|>a?<|end|><|assistant|>b<|end|>",
    "deepseek_v2": "<s><\uff5cUser\uff5c>a?<\uff5cAssistant\uff5c>b</s>",
    "deepseek_v3": "<s><\uff5cUser\uff5c>a?<\uff5cAssistant\uff5c>b"
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "cohere": "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>a?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>b<|END_OF_TURN_TOKEN|>",
    "zephyr": "<|user|>\na?</s>\n<|assistant|>\nb</s>\n",
    "tulu": "<|user|>\na?\n<|assistant|>\nb</s>",
    "alpaca": "<s>### Instruction:\na?\n\n### Response:\nb</s>",
    "vicuna": "<s>A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. USER: a? "
    "ASSISTANT: b</s>",
    "falcon": "User: a?\nFalcon: b</s>\n",
}


def config_of(**settings):
    return LemaConfig(model_name_or_path="model", **settings)


def with_end(make_tokenizer, name):
    """A tokenizer that has the token which ends a turn, as a plain one that is added."""
    tokenizer = make_tokenizer()
    end = NAMED[name].end
    if end != EOS:
        tokenizer.add_tokens([end])
    return tokenizer


@pytest.mark.parametrize("name", NAMED)
def test_a_chat_is_written_as_it_was_published_and_ends_in_its_token(make_tokenizer, name):
    tokenizer = with_end(make_tokenizer, name)
    forms = forms_of(config_of(chat_template=name))
    for turns in (TURNS[:2], TURNS, [SYSTEM, *TURNS]):
        if name == "gemma" and turns[0] is SYSTEM:
            with pytest.raises(DataError, match="Gemma has no system message"):
                prepare_data([{"messages": turns}], tokenizer, max_length=512, forms=forms)
            continue
        rows = prepare_data([{"messages": turns}], tokenizer, max_length=512, forms=forms)
        ids, labels = rows[0].values()
        text = tokenizer.decode(ids)
        if len(turns) == 2:
            assert text == RENDERED[name]
        if turns[0] is SYSTEM and name not in ("mistral_v2v3", "mistral_v3_tekken"):
            assert text.count("be kind") == 1
        end = "</s>" if NAMED[name].end == EOS else NAMED[name].end
        number = tokenizer.convert_tokens_to_ids(end)
        trained = [token for token, label in zip(ids, labels, strict=True) if label != -100]
        assert trained.count(number) == len([turn for turn in turns if turn["role"] == "assistant"])
        assert stop_tokens_of(rows, forms.with_template(tokenizer)) == (number,)


def test_a_name_has_others_and_a_file_or_a_template_of_the_tokenizer_comes_first(
    make_tokenizer, write, monkeypatch
):
    assert named_template("qwen_25") == named_template("Qwen2.5") == named_template("qwen25")
    assert named_template("mistral") == named_template("mistral_v2v3")
    tokenizer = make_tokenizer({"default": "{{ 1 }}", "zephyr": "{{ 2 }}"})
    assert (
        forms_of(config_of(chat_template="zephyr")).with_template(tokenizer).chat_template
        == "{{ 2 }}"
    )
    path = write("chatml", "{{ 3 }}")
    monkeypatch.chdir(path.parent)
    assert (
        forms_of(config_of(chat_template="chatml")).with_template(tokenizer).chat_template
        == "{{ 3 }}"
    )


def test_an_unknown_name_is_answered_with_the_names(make_tokenizer):
    forms = forms_of(config_of(chat_template="lama3"))
    with pytest.raises(DataError, match=r"did you mean llama3(.|\n)*there are chatml, qwen25"):
        forms.with_template(make_tokenizer())


def test_an_end_that_is_no_token_is_said(make_tokenizer):
    forms = forms_of(config_of(chat_template="llama3"))
    rows = prepare_data([{"messages": TURNS}], make_tokenizer(), max_length=512, forms=forms)
    assert "'<|eot_id|>', which is no single token of this tokenizer" in str(rows.notes)
    assert end_token(forms.with_template(make_tokenizer())) == ("<|eot_id|>", None)
    assert end_token(make_tokenizer("{{ messages }}")) == ("", None)
