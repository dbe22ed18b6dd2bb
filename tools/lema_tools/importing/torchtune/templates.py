"""What torchtune's tokenizers write around messages, as Jinja with marks around what trains.

torchtune masks whole messages, so the tokens that open an answer are trained, too. Tokens at the
end of a row that are masked there, such as the last `<|end_of_text|>` of Llama 3, change nothing
that is computed, and are left out.
"""

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "chat_template"]


@dataclass(frozen=True)
class Family:
    """The tokenizer of a family of models.

    Args:
        open: what a message begins with, as an expression of Jinja.
        close: what a message ends with.
        last: what the last message ends with, if it is an answer; None: as `close`.
        begin: what a chat begins with.
        turn: what each turn begins with, which is a question and its answer.
        content: the text of a message as an expression.
        in_pieces: the tokenizer reads pieces of a text one by one, which may give other tokens.
    """

    open: str
    close: str
    last: str | None = None
    begin: str = ""
    turn: str = ""
    content: str = "message.content"
    in_pieces: bool = False


_LLAMA3_OPEN = (
    "'<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + "
    "'<|end_header_id|>\\n\\n'"
)
_CHATML = "'<|im_start|>' + message.role + '\\n'"
_INST = "('[INST] ' if message.role == 'user' else '')"
_INST_END = "(' [/INST] ' if message.role == 'user' else '')"

FAMILIES = {
    "llama3_tokenizer": Family(
        _LLAMA3_OPEN, "'<|eot_id|>'", begin="bos_token", content="message.content | trim"
    ),
    "qwen2_tokenizer": Family(_CHATML, "'<|im_end|>\\n'", last="'<|endoftext|>'"),
    "qwen2_5_tokenizer": Family(_CHATML, "'<|im_end|>\\n'", last="'<|im_end|>'"),
    "qwen3_tokenizer": Family(_CHATML, "'<|im_end|>\\n'", last="'<|im_end|>'"),
    "phi3_mini_tokenizer": Family(
        "'<|' + message.role + '|>\\n'",
        "'<|end|>\\n' + (eos_token if message.role == 'assistant' else '')",
        turn="bos_token",
        in_pieces=True,
    ),
    "gemma_tokenizer": Family(
        "''", "(eos_token if message.role == 'assistant' else '')", turn="bos_token", in_pieces=True
    ),
    "mistral_tokenizer": Family(
        _INST,
        f"{_INST_END} + (eos_token if message.role == 'assistant' else '')",
        turn="bos_token",
        in_pieces=True,
    ),
    "llama2_tokenizer": Family(
        f"{_INST} + ('<<SYS>>\\n' if message.role == 'system' else '')",
        "('\\n<</SYS>>\\n\\n' if message.role == 'system' else '') + "
        f"{_INST_END} + (eos_token if message.role == 'assistant' else '')",
        turn="bos_token",
        in_pieces=True,
    ),
}
"""By the builder of the tokenizer."""


def chat_template(family: Family) -> str:
    """Return the chat template of a family."""
    end = f"{{{{- {family.close} -}}}}"
    if family.last is not None:
        end = f"{{{{- {family.last} if loop.last else {family.close} -}}}}"
    message = f"{{{{- {family.open} -}}}}{{{{- {family.content} -}}}}"
    turn = ""
    if family.turn:
        first = "loop.first or loop.previtem.role == 'assistant'"
        turn = f"{{%- if {first} -%}}{{{{- {family.turn} -}}}}{{%- endif -%}}"
    lines = [
        f"{{{{- {family.begin} -}}}}" if family.begin else "",
        "{%- for message in messages -%}",
        turn,
        "{%- if message.tool_calls -%}"
        "{{- raise_exception('this chat template shows no tool calls') -}}{%- endif -%}",
        "{%- if message.role == 'assistant' -%}",
        f"{{%- generation -%}}{message}{end}{{%- endgeneration -%}}",
        "{%- else -%}",
        f"{message}{{{{- {family.close} -}}}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}",
        "{%- set message = {'role': 'assistant'} -%}",
        f"{{{{- {family.open} -}}}}",
        "{%- endif -%}",
    ]
    return "\n".join(line for line in lines if line)
