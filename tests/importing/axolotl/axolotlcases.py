"""Examples of axolotl and small rows, of which `axolotltokens` writes the tokens.

Each case names a file in axolotl's folder `examples`; its keys about data are taken from there.
"""

from typing import Any

__all__ = ["CASES"]

# a template as tokenizers have it, which trims words and ends with the tokenizer's token
TRIMMED = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']\n' }}"
    "{{ message['content'] | trim }}{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
# another, which writes an empty thought before the last answer, and no thoughts before others
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n' }}"
    "{% if message.reasoning_content %}{{ message.reasoning_content }}{% endif %}{{ '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(*texts: str, system: str = "", user: str = "user", assistant: str = "assistant") -> Any:
    """Messages that alternate, the user's first."""
    roles = [user, assistant]
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return [{"role": "system", "content": system}] * bool(system) + messages


def shared(messages: Any) -> Any:
    """The same as ShareGPT writes them."""
    names = {"user": "human", "assistant": "gpt"}
    return [
        {"from": names.get(each["role"], each["role"]), "value": each["content"]}
        for each in messages
    ]


ALPACA = [
    {"instruction": "How cold is the lake?", "input": "", "output": "Four degrees."},
    {"instruction": "Say it again.", "input": "hello", "output": "hello there"},
    {"instruction": "Count.", "input": "", "output": "\n1, 2"},
]
TURNS = chat("hello", "hello there", "Is the lake cold?\nAnswer.", "It is cold in winter.")
SYSTEM = chat("Why do boats float?", "Because water carries them.", system="You are brief.")
BLANKS = chat("Is it cold?", " It is, and\n", "How cold?", "Four.\n\nOr five. ")
CHATS = [{"messages": messages} for messages in (TURNS, SYSTEM, BLANKS)]
SHARED = [{"conversations": shared(messages)} for messages in (TURNS, SYSTEM, BLANKS)]
LONE = [{"messages": messages} for messages in (TURNS, BLANKS)]
LONE_SHARED = [{"conversations": shared(messages)} for messages in (TURNS, BLANKS)]
THOUGHT = [
    {
        "messages": [
            {"role": "user", "content": "Is it cold?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "It is winter."},
        ]
    },
    *LONE,
]
PAIRS = [
    {
        "conversation": chat("Is the lake cold?"),
        "chosen": {"role": "assistant", "content": "It is cold in winter."},
        "rejected": {"role": "assistant", "content": "No."},
    },
    {
        "conversation": chat("hello", "hello there", "How cold?", system="You are brief."),
        "chosen": {"role": "assistant", "content": "Four degrees."},
        "rejected": {"role": "assistant", "content": "hello"},
    },
]
TEXTS = [{"text": "Water carries boats."}, {"text": "It is cold in winter.\n"}]

PLAIN = {"eos": "</s>"}
BEGINS = {"eos": "</s>", "begins": True}
SENTENCES = {"eos": "</s>", "begins": True, "prefix": "_"}
LLAMA = {"eos": "<|eot_id|>"}
LLAMA_BASE = {"eos": "<|end_of_text|>"}
IM = {"eos": "<|im_end|>"}
QWEN_BASE = {"eos": "<|end_of_text|>"}
GEMMA = {"eos": "</s>"}

CASES: list[dict[str, Any]] = [
    {"example": "llama-3/lora-1b.yml", "tokenizer": BEGINS, "rows": ALPACA},
    {"example": "llama-2/qlora.yml", "tokenizer": SENTENCES, "rows": ALPACA},
    {"example": "archived/cerebras/btlm-ft.yml", "tokenizer": PLAIN, "rows": ALPACA},
    {
        "example": "archived/falcon/config-7b-lora.yml",
        "keys": {"special_tokens": {"pad_token": "<pad>"}},
        "tokenizer": PLAIN,
        "rows": ALPACA,
    },
    {"example": "phi/phi3-ft.yml", "tokenizer": PLAIN, "rows": ALPACA},
    {"example": "qat_nvfp4/Gemma3-12B_baseline.yml", "tokenizer": BEGINS, "rows": ALPACA},
    {"example": "alst/llama3-8b-deepspeed-alst.yaml", "tokenizer": BEGINS, "rows": TEXTS},
    {"example": "llama-3/instruct-lora-8b.yml", "tokenizer": LLAMA, "rows": CHATS},
    {"example": "llama-3/fft-8b-liger-fsdp.yaml", "tokenizer": LLAMA_BASE, "rows": SHARED},
    {
        "example": "LiquidAI/lfm2-vl-lora.yaml",
        "tokenizer": {**PLAIN, "template": TRIMMED},
        "rows": CHATS,
    },
    {
        "example": "LiquidAI/lfm2-350m-fft.yaml",
        "tokenizer": {**IM, "template": THINKS},
        "rows": SHARED,
    },
    {
        "example": "internvl3_5/internvl3_5-8b-qlora.yml",
        "tokenizer": {**IM, "template": THINKS},
        "rows": THOUGHT,
    },
    {
        "example": "falcon-e/falcon-e-3b-ft.yaml",
        "tokenizer": {**PLAIN, "template": THINKS},
        "rows": SHARED,
    },
    {"example": "gemma3/gemma-3-1b-qlora.yml", "tokenizer": GEMMA, "rows": SHARED},
    {"example": "gemma3/gemma-3-4b-vision-qlora.yml", "tokenizer": BEGINS, "rows": CHATS},
    {"example": "gemma3n/gemma-3n-e2b-qlora.yml", "tokenizer": GEMMA, "rows": SHARED},
    {"example": "gemma2/qlora.yml", "tokenizer": GEMMA, "rows": SHARED},
    {"example": "falcon-h1/falcon-h1-1b-deep-qlora.yaml", "tokenizer": IM, "rows": SHARED},
    {"example": "qat_nvfp4/Math-Qwen2.5-72B_baseline.yml", "tokenizer": QWEN_BASE, "rows": CHATS},
    {"example": "qwen3/32b-qlora.yaml", "tokenizer": IM, "rows": SHARED},
    {"example": "plano/plano-4b-qlora.yaml", "tokenizer": IM, "rows": THOUGHT},
    {"example": "phi/lora-3.5.yaml", "tokenizer": {"eos": "<|end|>"}, "rows": CHATS},
    {"example": "deepseek-v2/qlora-fsdp-2_5.yaml", "tokenizer": PLAIN, "rows": SHARED},
    {"example": "cohere/command-r-7b-qlora.yml", "tokenizer": PLAIN, "rows": LONE_SHARED},
    {
        "example": "llama-4/do-no-use-fa2/maverick-qlora-fsdp1.yaml",
        "tokenizer": PLAIN,
        "rows": SHARED,
    },
    {"example": "gemma4/26b-a4b-moe-bnb-lora.yaml", "tokenizer": PLAIN, "rows": SHARED},
    {"example": "qwen3.5/122b-a10b-moe-qlora-fsdp.yaml", "tokenizer": IM, "rows": SHARED},
    {"example": "qwen2-vl/lora-7b.yaml", "tokenizer": IM, "rows": CHATS},
    {"example": "llama-3/instruct-dpo-lora-8b.yml", "tokenizer": LLAMA, "rows": PAIRS},
    {"example": "mistral/dpo/mistral-dpo-qlora.yml", "tokenizer": IM, "rows": PAIRS},
    {"example": "qwen2/dpo.yaml", "tokenizer": QWEN_BASE, "rows": PAIRS},
]
