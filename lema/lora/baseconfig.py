"""What a model's `config.json` says that changes numbers, as it is recorded beside an adapter.

Weights are half of a model: with another epsilon in its norms, or other rotary angles, the same
weights compute something else, and an adapter is noise on that as on other weights. Where two files
differ, both are read by the class of transformers for their type first, because another version of
it may have written the same under another name, or with the defaults.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lema.errors import AdapterError

__all__ = ["OF_PREPARED", "differences", "of_numbers"]

# Keys that change no number of a model whose weights are loaded: names, versions and places, the
# form of what a forward returns, the type to compute in, which is a setting of a run, what begins
# and ends a text, and how to begin training.
OTHERS = frozenset(
    [
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "transformers_version",
            "transformers_weights",
        ),
        *("return_dict", "output_attentions", "output_hidden_states", "use_cache"),
        *(
            "dtype",
            "torch_dtype",
            "_attn_implementation",
            "attn_implementation",
            "_experts_implementation",
        ),
        *(
            "id2label",
            "label2id",
            "problem_type",
            "task_specific_params",
            "initializer_factor",
            "initializer_range",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "decoder_start_token_id",
            "forced_eos_token_id",
        ),
    ]
)
OF_PREPARED = frozenset({"quantization_config", "tie_word_embeddings"})
"""Keys that `lema prepare` changes, because they say how weights are stored."""
MOST_NAMED = 3  # in one message


def of_numbers(config: bytes) -> dict[str, Any] | None:
    """Return what the bytes of a `config.json` say that changes numbers; None: they are no JSON
    object.
    """
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
        return None
    return _filtered(content, OTHERS) if isinstance(content, dict) else None


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = ()
) -> list[str]:
    """Return in sentences, a few of them, what two configs say differently that changes numbers,
    `ignored` keys aside. `AdapterError`: transformers cannot read one of them."""
    left = _filtered(before, ignored)
    right = _filtered(now, ignored)
    if left == right:
        return []
    was, is_now = (
        dict(_flat(_filtered(_read(config), {*OTHERS, *ignored}))) for config in (left, right)
    )
    absent = "not there"
    names = [
        name
        for name in sorted(was.keys() | is_now.keys())
        if was.get(name, absent) != is_now.get(name, absent)
    ]
    sentences = [
        f"{name:.80} is {is_now.get(name, absent)!r:.80}, and it was {was.get(name, absent)!r:.80}"
        for name in names[:MOST_NAMED]
    ]
    return sentences + [f"and {len(names) - MOST_NAMED} more"] * (len(names) > MOST_NAMED)


def _filtered(config: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    return {
        key: _filtered(value, left_out) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in left_out
    }


def _read(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config as transformers reads it, with its defaults; as it is, where transformers
    has no class for it.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return config
    try:
        read = CONFIG_MAPPING[kind].from_dict(dict(config)).to_dict()
    except Exception as error:  # of any kind, in code of others, by values of others
        what = f"transformers cannot read what was recorded of the model's config: {error!s:.200}"
        raise AdapterError(
            what, where=f"model_type: {kind}", how="copy or save the adapter again"
        ) from error
    # keys that are numbers are text in a file
    json_config: dict[str, Any] = json.loads(json.dumps(read, default=str))
    return json_config


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
