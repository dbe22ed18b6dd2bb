"""A small byte-level tokenizer trained on the spot, chat templates for it, and a way to write
data files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "The river runs past the mill and under the old stone bridge.",
    "A question is asked, and the answer is given in a few words.",
    "user assistant system: what is the name of the river? The name of the river is long.",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ "
    "m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
# Like the templates of reasoning models: what the last answer looks like changes once another
# message follows.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '(thinking)' }}{% endif %}{{ m.content "
    "+ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system "
    "role') }}{% endif %}"
) + (
    "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt "
    "%}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates by what is particular about them."""
    return {"plain": CHATML, "marked": MARKED, "rewriting": REWRITING, "strict": STRICT}


@pytest.fixture(scope="session")
def trained() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return bpe.to_str()


MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture
def make_tokenizer(trained: str) -> MakeTokenizer:
    """Tokenizers which differ in what they add around a text, and in their chat template."""

    def make(
        template: str | None = None, around: str = "<s> $A", eos: str | None = "</s>"
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(trained)
        specials = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single=around, pair="$A $B", special_tokens=specials),
            ]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token=eos
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a data file: rows as JSON lines, or bytes and text as they are."""

    def write_file(name: str, content: str | bytes | list[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file
