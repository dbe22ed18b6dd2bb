"""Chat templates of model families, each written anew with what is particular to the published
one's behaviour.

What each does with earlier turns, reasoning, tool calls and the end of a turn is that of the
family's template; long texts, such as how tools are described, are left out. `Family.answer` says
what is to be learnt of an answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]


def plain(words: str, _last: bool) -> str:
    return words


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and what of an answer is learnt."""

    template: str
    specials: tuple[str, ...]
    end: str  # of a turn
    last_end: str | None = None  # of the last turn, where that is another
    # what stands before the end, of its words and whether it is the last
    answer: Callable[[str, bool], str] = plain
    system: bool = True  # whether there may be a system message
    # what is learnt of a tool call; None: the template has none, and it is refused
    call: str | None = None
    call_last: str | None = None  # of one at the end of a chat, where that is another
    # what is learnt of the last answer where it has reasoning; None: without it
    thought: str | None = None
    # the rendering has all that is learnt; else the token that ends the chat is added
    own: bool = True

    def learnt(self, words: str, last: bool) -> str:
        """What is to be learnt of an answer."""
        return self.answer(words, last) + (
            self.last_end if last and self.last_end is not None else self.end
        )


def chatml(assistant: str, *, before: str = "", prompt: str = "", tool: str = "tool") -> str:
    """Messages between two tokens; `assistant` writes one of the assistant's."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}{{% "
        f"elif m.role == 'tool' %}}"
        f"{{{{ '<|im_start|>{tool}\n<tool_response>\n' + m.content + "
        f"'\n</tool_response><|im_end|>\n' }}}}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
        "endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + prompt + "' }}{% endif %}"
    )


# Where the last question was asked: templates of reasoning models keep thoughts from there on.
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
THOUGHT = (
    "{% set thought = m.reasoning_content or '' %}{% set words = m.content or '' %}{% if "
    "'</think>' in words %}"
    "{% set thought = words.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set words = words.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
JSON_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if words or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
)
XML_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for key, value in c.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\n' + value | string + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "n": 3}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
IM = ("<|im_start|>", "<|im_end|>")

CHATML = chatml("{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}")
QWEN2_5 = chatml(
    "{% set words = m.content or '' %}{{ '<|im_start|>assistant\n' + words }}"
    + JSON_CALLS
    + "{{ '<|im_end|>\n' }}",
    before=TOOLS,
    tool="user",
)
QWEN3 = chatml(
    THOUGHT
    + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    + "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ words }}"
    + JSON_CALLS
    + "{{ '<|im_end|>\n' }}",
    before=TOOLS + LAST_QUESTION,
    tool="user",
)
QWEN3_5 = chatml(
    THOUGHT
    + (
        "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}{{ '<think>\n' + thought "
        "+ '\n</think>\n\n' }}"
    )
    + "{% endif %}{{ words }}"
    + XML_CALLS
    + "{{ '<|im_end|>\n' }}",
    before=TOOLS + LAST_QUESTION,
    prompt="<think>\n",
    tool="user",
)
NEMOTRON = chatml(
    THOUGHT
    + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and thought %}"
    + (
        "{{ '<think>\n' + thought + '\n</think>\n' }}{% else %}{{ '<think></think>' }}{% endif "
        "%}{{ words }}"
    )
    + XML_CALLS
    + "{{ '<|im_end|>\n' }}",
    before=TOOLS + LAST_QUESTION,
    prompt="<think>\n",
    tool="user",
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + "
    "'<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' "
    "}}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions "
    "to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson + '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{# tools #}"
)
LLAMA3 = (
    "{% for m in messages %}{% set said = '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + "
    "(m.content or '') | trim + '<|eot_id|>' %}{% if loop.first %}{{ bos_token }}{% endif "
    "%}{{ said }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' "
    "}}{% endif %}"
)
LLAMA3_1 = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + "
    "strftime_now('%d %b %Y') }}"
    "{% if messages[0].role == 'system' %}{{ '\n' + messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|eot_id|>' }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name }}'
    "{{ '\", \"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{ m.content | tojson + '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    "{# tools #}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
LLAMA2 = (
    "{% set told = '' %}{% if messages[0].role == 'system' %}"
    "{% set told = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set messages "
    "= messages[1:] %}{% endif %}" + ALTERNATE + "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (told if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + "
    "messages[0].content }}"
    "{{ '[/SYSTEM_PROMPT]' }}{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% "
    "elif m.tool_calls %}"
    "{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{ c.function.arguments | tojson }}{{ ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last else '' }}"
    "{% endfor %}{{ ']' + eos_token }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role "
        "not supported') }}{% endif %}"
    )
    + ALTERNATE
    + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set told = '' %}{% if messages[0].role == 'system' %}"
    "{% set told = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    + ALTERNATE
    + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (told if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for b in m.content %}{{ b.text | trim }}{% endfor %}{% endif %}{{ "
    "'<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# A tool's output is a part of the assistant's own turn.
GEMMA4 = (
    "{{ bos_token }}{% set ns = namespace(open=false) %}{% for m in messages %}{% if "
    "m.role == 'tool' %}"
    "{{ '<|tool_response>' + m.content + '<tool_response|>' }}{% else %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% if not ns.open %}{{ '<|turn>' + role + '\n' }}{% endif %}{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + "
    "c.function.arguments | tojson }}"
    "{{ '<tool_call|>' }}{% endfor %}{% set ns.open = m.tool_calls is defined %}"
    "{% if m.tool_calls is defined and loop.last %}{{ '<|tool_response>' }}{% elif not "
    "ns.open %}{{ '<turn|>\n' }}"
    "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}{{ "
    "'<|turn>model\n' }}{% endif %}"
    "{# tools #}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '<|end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + (m.content or '') "
    "+ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# Arguments are joined to text as they are; after a tool's output there is neither a header nor a
# generation prompt.
DEEPSEEK = (
    "{% set ns = namespace(tool=false, told='') %}{% for m in messages %}{% if m.role == "
    "'system' %}"
    "{% set ns.told = ns.told + m.content %}{% endif %}{% endfor %}{{ bos_token + ns.told "
    "}}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls is defined %}{% set ns.tool = false %}"
    "{{ '<|Assistant|>' + m.content + '<|tool_calls_begin|>' }}{% for c in m.tool_calls %}"
    "{{ c.type + '<|tool_sep|>' + c.function.name + '\n```json\n' + c.function.arguments + "
    "'\n```' }}{% endfor %}"
    "{{ '<|tool_calls_end|><|end_of_sentence|>' }}{% elif m.role == 'assistant' %}{% if ns.tool %}"
    "{{ '<|tool_outputs_end|>' + m.content + '<|end_of_sentence|>' }}{% set ns.tool = "
    "false %}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% "
    "endif %}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<|tool_outputs_begin|>' if not ns.tool else '' }}{{ m.content }}"
    "{% set ns.tool = true %}{% endif %}{% endfor %}{% if ns.tool %}{{ "
    "'<|tool_outputs_end|>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% "
    "elif m.role == 'user' %}"
    "{{ '<|User|>' + m.content }}{% elif m.role == 'assistant' and m.content is defined %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# No token ends a turn but the one that opens the next.
GLM = (
    "{{ '[gMASK]<sop>' }}"
    + LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + THOUGHT
    + "{{ '<|assistant|>' }}{% if loop.index0 > ns.last and thought %}{{ '\n<think>' + "
    "thought + '</think>' }}"
    "{% else %}{{ '\n<think></think>' }}{% endif %}{% if words %}{{ '\n' + words }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for key, value in c.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' + value | string + '</arg_value>\n' "
    "}}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{% elif m.role == 'tool' %}"
    "{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}"
    "{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{# tools #}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] %}"
    "{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + (m.content or '') | trim + "
    "'<|END_OF_TURN_TOKEN|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}{% else %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
GRANITE = (
    "{% if messages[0].role != 'system' %}{{ "
    "'<|start_of_role|>system<|end_of_role|>Help.<|end_of_text|>\n' }}"
    "{% endif %}{% for m in messages %}{% set role = 'tool_response' if m.role == 'tool' "
    "else m.role %}"
    "{{ '<|start_of_role|>' + role + '<|end_of_role|>' + (m.content or '') }}{% if m.tool_calls %}"
    "{{ '<|tool_call|>[' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor "
    "%}{{ ']' }}{% endif %}"
    "{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% "
    "endif %}{# tools #}"
)
# It says itself what is the assistant's; how it thinks is written in the system message.
SMOLLM3 = (
    "{% set quiet = messages[0].role == 'system' and '/no_think' in messages[0].content "
    "%}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% if quiet %}{{ '<think>\n\n</think>\n' }}{% endif %}{{ m.content + '<|im_end|>' "
    "}}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif "
    "%}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
KIMI_K2 = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + "
    "'<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ "
    "'<|im_assistant|>assistant<|im_middle|>' }}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for "
    "c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>functions.' + c.function.name + ':0<|tool_call_argument_begin|>' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | "
    "tojson }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{% else %}"
    "{{ '<|im_system|>' if m.role != 'user' else '<|im_user|>' }}{{ m.role + "
    "'<|im_middle|>' + m.content }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
MINIMAX = (
    "{% for m in messages %}{% set role = 'ai' if m.role == 'assistant' else m.role %}"
    "{{ ']~b]' + role + '\n' + (m.content or '') + '[e~[\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
ERNIE = (
    "{{ '<|begin_of_sentence|>' }}{% for m in messages %}{% if m.role == 'user' %}{{ "
    "'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + '<|end_of_sentence|>' }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
HUNYUAN = (
    "{{ '<|hy_begin|>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|hy_User|>' "
    "+ m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|hy_Assistant|>' + m.content.split('<answer>')[-1].split('</answer>')[0].strip() "
    "+ '<|hy_end|>' }}"
    "{% else %}{{ m.content + '<|hy_sep|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|hy_Assistant|>' }}{% endif %}"
)
EXAONE = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ "
    "'[|system|][|endofturn|]\n' }}{% endif %}"
    "{{ '[|' + m.role + '|]' + (m.content or '') }}{% if m.role == 'user' %}{{ '\n' }}{% else %}"
    "{{ '[|endofturn|]' }}{{ '\n' if not loop.last else '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
)
VICUNA = (
    "{{ 'A chat.' }}{% for m in messages %}{% if m.role == 'user' %}{{ ' USER: ' + "
    "m.content + ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% else "
    "%}{{ ' ' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# It knows no generation prompt: who speaks is written with the words, and is not to be learnt.
NO_PROMPT = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + eos_token + '\n' }}{% "
    "endfor %}"
)

_DEEPSEEK_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "User",
        "Assistant",
        "end_of_sentence",
        "tool_calls_begin",
        "tool_calls_end",
        "tool_sep",
        "tool_outputs_begin",
        "tool_outputs_end",
    )
)
_HARMONY_TOKENS = tuple(
    f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message")
)
_KIMI_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "im_system",
        "im_user",
        "im_assistant",
        "im_middle",
        "im_end",
        "tool_calls_section_begin",
        "tool_calls_section_end",
        "tool_call_begin",
        "tool_call_argument_begin",
        "tool_call_end",
    )
)
_MISTRAL_TOKENS = tuple(
    f"[{end}{name}]" for name in ("INST", "SYSTEM_PROMPT", "TOOL_RESULTS") for end in ("", "/")
)
_GLM_CALL = (
    "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>"
)
_ARGUMENTS = '{"city": "Paris", "n": 3}'

FAMILIES = {
    "ChatML": Family(CHATML, IM, "<|im_end|>"),
    "Qwen2.5": Family(QWEN2_5, IM, "<|im_end|>", call=CALL + "<|im_end|>"),
    "Qwen3": Family(
        QWEN3,
        IM,
        "<|im_end|>",
        answer=lambda words, last: "<think>\n\n</think>\n\n" * last + words,
        call=CALL + "<|im_end|>",
        call_last="<think>\n\n</think>\n\n" + CALL + "<|im_end|>",
        thought="<think>\nWheels turn.\n</think>\n\nOld.<|im_end|>",
    ),
    "Qwen3.5": Family(
        QWEN3_5,
        IM,
        "<|im_end|>",
        answer=lambda words, last: "\n</think>\n\n" * last + words,
        call=XML_CALL + "<|im_end|>",
        call_last="\n</think>\n\n" + XML_CALL + "<|im_end|>",
        thought="Wheels turn.\n</think>\n\nOld.<|im_end|>",
    ),
    "Nemotron": Family(
        NEMOTRON,
        IM,
        "<|im_end|>",
        answer=lambda words, last: "</think>" + words,
        call="</think>" + XML_CALL + "<|im_end|>",
        thought="Wheels turn.\n</think>\nOld.<|im_end|>",
    ),
    "gpt-oss": Family(
        HARMONY,
        _HARMONY_TOKENS,
        "<|end|>",
        last_end="<|return|>",
        answer=lambda words, last: "<|channel|>final<|message|>" + words,
        call=f" to=functions.weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
        thought="<|channel|>analysis<|message|>Wheels "
        "turn.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Old.<|return|>",
    ),
    "Llama 2": Family(LLAMA2, ("<s>", "</s>"), " </s>", answer=lambda words, last: " " + words),
    "Llama 3": Family(
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"
    ),
    "Llama 3.1": Family(
        LLAMA3_1,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        call=f'{{"name": "weather", "parameters": {_ARGUMENTS}}}<|eot_id|>',
    ),
    "Mistral": Family(
        MISTRAL,
        (*_MISTRAL_TOKENS, "[TOOL_CALLS]"),
        "</s>",
        call=(
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {_ARGUMENTS}, "id": "abcdefghi"}}]</s>'
        ),
    ),
    "Gemma 2": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", system=False),
    "Gemma 3": Family(GEMMA3, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "Gemma 4": Family(
        GEMMA4,
        (
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
        ),
        "<turn|>",
        call=f"<|tool_call>call:weather{_ARGUMENTS}<tool_call|><|tool_response>",
    ),
    "Phi-3": Family(PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "Phi-4": Family(PHI4, ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>"),
    "DeepSeek V3": Family(
        DEEPSEEK,
        _DEEPSEEK_TOKENS,
        "<|end_of_sentence|>",
        call=f"<|tool_calls_begin|>function<|tool_sep|>weather\n```json\n{_ARGUMENTS}\n```<|tool_calls_end|>"
        "<|end_of_sentence|>",
    ),
    "DeepSeek R1": Family(R1, _DEEPSEEK_TOKENS, "<|end_of_sentence|>"),
    "GLM-4": Family(
        GLM,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
        "<|user|>",
        answer=lambda words, last: "\n<think></think>\n" + words,
        call=_GLM_CALL,
        thought="\n<think>Wheels turn.</think>\nOld.<|user|>",
        own=False,
    ),
    "Command R": Family(
        COMMAND_R,
        (
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "OLMo 2": Family(OLMO2, ("<|system|>", "<|user|>", "<|assistant|>"), "</s>"),
    "Granite": Family(
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        "<|end_of_text|>",
        call=f'<|tool_call|>[{{"name": "weather", "arguments": {_ARGUMENTS}}}]<|end_of_text|>',
    ),
    "SmolLM3": Family(SMOLLM3, IM, "<|im_end|>"),
    "Zephyr": Family(ZEPHYR, ("<|system|>", "<|user|>", "<|assistant|>"), "</s>"),
    "Kimi K2": Family(
        KIMI_K2,
        _KIMI_TOKENS,
        "<|im_end|>",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    ),
    "MiniMax": Family(MINIMAX, ("]~b]", "[e~["), "[e~["),
    "ERNIE 4.5": Family(
        ERNIE, ("<|begin_of_sentence|>", "<|end_of_sentence|>"), "<|end_of_sentence|>"
    ),
    "Hunyuan": Family(
        HUNYUAN,
        ("<|hy_begin|>", "<|hy_User|>", "<|hy_Assistant|>", "<|hy_end|>", "<|hy_sep|>"),
        "<|hy_end|>",
    ),
    "EXAONE": Family(
        EXAONE, ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"), "[|endofturn|]"
    ),
    "Vicuna": Family(VICUNA, ("</s>",), "</s>", answer=lambda words, last: " " + words),
    "no generation prompt": Family(NO_PROMPT, ("</s>",), "</s>"),
}
