"""Chat templates and tokenizers that make far more text than there was, drawn from a grammar
each.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

from faults import watch
from faults.tinymodel import TinyModel

__all__ = ["SIZES", "chat_template", "tokenizer"]

SIZES = (1, 2, 40, 1000, 10**5, 10**6, 10**7, 10**8, 10**9, 10**10, 10**12, 2**63, 10**30)

# Statements of jinja: E stands for an expression, T for further statements, N for a number.
STATEMENTS = (
    "{{ E }}",
    "{% for i in range(N) %}T{% endfor %}",
    "{% set a = E %}{% set a = a ~ a %}{% set a = a ~ a %}{% set a = a * N %}{{ a | length }}",
    (
        "{% set s = namespace(a='ab') %}{% for i in range(N) %}{% set s.a = s.a + s.a %}{% "
        "endfor %}{{ s.a }}"
    ),
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(E) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% if E %}T{% endif %}{{ messages | tojson }}",
    "{% generation %}{{ E }}{% endgeneration %}{{ raise_exception(E) }}",
    "{% filter center(N) %}T{% endfilter %}",
    "{% set x %}T{% endset %}{{ x * N }}",
)
EXPRESSIONS = (
    *(
        "(E * N)",
        "('%Ns' % E)",
        "('{:>N}'.format(E))",
        "(E | string | center(N))",
        "(range(N) | list)",
        "(E ~ E)",
    ),
    *(
        "(E | string | replace('a', 'a' * N))",
        "(E | string).ljust(N)",
        "([E] * N | join(E))",
        "(N ** N)",
        "(N * N * N)",
    ),
    *(
        "(E | string | indent(N))",
        "'1'.zfill(N)",
        "(E | tojson(indent=N))",
        "('a' | batch(N, 'b') | list)",
    ),
    *(
        "(E | string).join(E | string)",
        "(E | string).encode().hex()",
        "(E | string).translate({97: 'a' * N})",
    ),
    *(
        "(N | float | string)",
        "(E | string | wordwrap(N))",
        "'\\t'.expandtabs(N)",
        "strftime_now('%NY')",
        "lipsum(n=N)",
    ),
    *(
        "'{:Nd}'.format(N)",
        "((E | string) * N)[:1]",
        "'a'.rjust(N | int)",
        "(messages * N) | length",
    ),
    *("(-N | abs | round(N))", "dict(a=E) | string"),
)
CONSTANTS = ("'a'", "1", "messages", "messages[0].content", "[1]")


def _template(draw: Random) -> str:
    """Draw statements that make texts, numbers and lists."""
    text = draw.choice(STATEMENTS)
    for depth in range(6):
        further = STATEMENTS if depth < 2 else ("a", "{{ messages[0].content }}")
        made = EXPRESSIONS if depth < 3 else CONSTANTS
        parts = []
        for letter in text:
            drawn = {"T": further, "E": made, "N": tuple(map(str, SIZES))}.get(letter)
            parts.append(draw.choice(drawn) if drawn else letter)
        text = "".join(parts)
    return text


def chat_template(made: TinyModel, place: Path, draw: Random) -> str:
    """A chat template that multiplies text."""
    text = "".join(_template(draw) for _ in range(draw.choice((1, 1, 3))))
    (made.model(place) / "chat_template.jinja").write_text(text, encoding="utf-8")
    rows = place / "rows.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    return watch.command(
        "data", made.config(place, train_data=str(rows)), named=(str(rows), str(place))
    )


def tokenizer(made: TinyModel, place: Path, draw: Random) -> str:
    """A tokenizer.json whose parts grow text, fail, or name what is not there."""
    file = made.model(place) / "tokenizer.json"
    content = json.loads(file.read_bytes())
    for _ in range(draw.choice((1, 1, 2))):
        content[draw.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder"))] = _part(
            draw, 3
        )
        if draw.random() < 0.5:
            key, value = draw.choice(_further(draw))
            (content["model"] if key in content["model"] and draw.random() < 0.5 else content)[
                key
            ] = value
    file.write_text(json.dumps(content), encoding="utf-8")
    rows = place / "rows.jsonl"
    texts = ("a b", "é\ud83d\ude00" * 30, "a" * draw.choice((1, 30, 50_000)))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return watch.command(
        "data", made.config(place, train_data=str(rows)), named=(str(rows), str(place), "tokenizer")
    )


PATTERNS = (
    {"String": ""},
    {"String": "a"},
    *({"Regex": one} for one in ("", "(a+)+$", "(?=a)", "(a|a)*b", "[", ".")),
)
BARE = (
    "NFC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "Nmt",
    "Whitespace",
    "Digits",
    "Fuse",
    "ByteFallback",
    "Bogus",
)
BEHAVIORS = ("Isolated", "Removed", "MergedWithNext", "Contiguous")


def _part(draw: Random, depth: int) -> Any:
    """Draw a normaliser, a pre-tokeniser, a post-processor or a decoder, or something that is
    none.
    """
    if depth and draw.random() < 0.4:
        inner = [_part(draw, depth - 1) for _ in range(draw.choice((0, 1, 3, 12)))]
        return {
            "type": "Sequence",
            draw.choice(("normalizers", "pretokenizers", "processors", "decoders")): inner,
        }
    size = draw.choice((1, 2, 30, 900, 10**5, 10**6))
    pattern = draw.choice(PATTERNS)
    text = draw.choice(("", "a", "▁", "ab")) * size
    big = draw.choice((0, 2**32 - 1))
    pieces = [
        {"SpecialToken": {"id": "x", "type_id": size}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    special = {"x": {"id": "x", "ids": [big] * size, "tokens": ["x"] * draw.choice((1, size))}}
    ends = {"sep": ["x", big], "cls": ["y", 10**6]}
    trimmed = {"trim_offsets": True, "add_prefix_space": True}
    drawn: Any = draw.choice(
        (
            {"type": "Replace", "pattern": pattern, "content": text},
            {"type": "Prepend", "prepend": text},
            {
                "type": "Metaspace",
                "replacement": draw.choice(("▁", "", text[:40])),
                "prepend_scheme": "always",
            },
            {
                "type": "Split",
                "pattern": pattern,
                "behavior": draw.choice(BEHAVIORS),
                "invert": big > 0,
            },
            {
                "type": "Precompiled",
                "precompiled_charsmap": draw.choice(("", "AAAA", "A" * 4 * size)),
            },
            {"type": "ByteLevel", "use_regex": True, **trimmed},
            {"type": draw.choice(BARE)},
            {
                "type": "TemplateProcessing",
                "single": pieces * min(size, 1000),
                "pair": [],
                "special_tokens": special,
            },
            {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}},
            {"type": "BertProcessing", **ends},
            {"type": "RobertaProcessing", **ends, **trimmed},
            {"type": "Strip", "content": text[:1], "start": size, "stop": 2**40},
            {"type": "FixedLength", "length": draw.choice((0, 1, size))},
            draw.choice((None, {}, [], "a", 3)),
        )
    )
    return drawn


def _further(draw: Random) -> list[tuple[str, Any]]:
    """Draw what else a tokenizer may say, wrong in its own way."""
    size = draw.choice((0, 1, 2, 10**6, 10**9, 2**32 - 1, 2**63, 2**64, 10**30, -1))
    padding = {
        "strategy": draw.choice(({"Fixed": size}, "BatchLongest")),
        "direction": "Right",
        "pad_token": "x",
    }
    padding |= {"pad_to_multiple_of": draw.choice((None, size)), "pad_id": size, "pad_type_id": 0}
    token = {
        "id": size,
        "content": draw.choice(("", "a", " ", "zz")),
        "lstrip": True,
        "rstrip": True,
    }
    token |= {
        "single_word": False,
        "normalized": draw.random() < 0.5,
        "special": draw.random() < 0.5,
    }
    cut = {
        "direction": "Right",
        "max_length": size,
        "strategy": "LongestFirst",
        "stride": draw.choice((0, size)),
    }
    return [
        ("padding", padding),
        ("truncation", cut),
        ("added_tokens", [token] * draw.choice((1, 3))),
        ("unk_token", draw.choice(("nope", None, "", 3))),
        ("vocab", draw.choice(({}, {"a": size}, {"a": 0, "b": 0}, [], [["a", -1.0]]))),
        ("merges", draw.choice(([], [["a", "nope"]], ["a b c"], ["a a"] * 1000))),
        ("dropout", draw.choice((0.5, 2.0, -1, 10**40))),
        (
            draw.choice(("continuing_subword_prefix", "end_of_word_suffix")),
            "a" * draw.choice((1, 10**6)),
        ),
        ("type", draw.choice(("BPE", "WordPiece", "WordLevel", "Unigram", "Bogus", None))),
        (draw.choice(("byte_fallback", "ignore_merges", "fuse_unk")), True),
        ("version", "9.9"),
    ]
