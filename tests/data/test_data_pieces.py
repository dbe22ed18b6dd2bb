"""A text that is taken in pieces has the tokens and the marks that it has as a whole, whatever
the text.
"""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lema.data.chat.pieces import _PIECE, Pieces

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# What the files of published tokenizers say; None: GPT-2's, which the library has.
EXPRESSIONS = {
    "gpt2": None,
    "llama3": (
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| "
        rf"?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
    ),
    "qwen2": (
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| "
        rf"?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
    ),
    "qwen3.5": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}*{CASED[1]}+{SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}+{CASED[1]}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
}
WORDS = (
    "the",
    "river",
    "Mill",
    "THE",
    "it's",
    "I'LL",
    "12345",
    "naïve",
    "e\u0301",
    "\u0301",
    "東京",
    "👍🏽",
    "...",
    "(",
    ");",
)
BREAKS = (
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "\x1c",
    "\u200b",
    "/",
    "'",
    "",
)
TOKENS = ("<|im_start|>", "<|im_end|>", "</s>", "<|im_", "plain", "plainer")
CHARACTERS = st.sampled_from(WORDS + BREAKS * 2 + TOKENS) | st.text(max_size=3)
# blank ones are refused
TEXTS = st.lists(CHARACTERS, min_size=1, max_size=40).map("".join).filter(str.strip)


def split(expression: str, **how: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(expression), "isolated", **how)


def made(
    trained: str, first: list[pre_tokenizers.PreTokenizer], nfc: bool = False, **level: bool
) -> Tokenizer:
    backend = Tokenizer.from_str(trained)
    level = {"add_prefix_space": False, "use_regex": not first, **level}
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(**level)])
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.add_tokens(["plain", AddedToken("plainer", normalized=False)])
    return backend


@pytest.fixture(scope="module")
def known(trained):
    """Tokenizers by the expression that they cut texts by, and what is known of their pieces,
    from one text on.
    """
    found = {}
    for number, (name, expression) in enumerate(EXPRESSIONS.items()):
        first = [] if expression is None else [split(expression)]
        backend = made(trained, first, nfc=number % 2 == 1)
        around = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        backend.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=number % 2 == 0), around]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
        )
        found[name] = Pieces(tokenizer)
    return found


@pytest.mark.parametrize("name", EXPRESSIONS)
@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS, places=st.lists(st.integers(0, 200), min_size=2, max_size=6), whole=st.booleans()
)
def test_pieces_have_the_tokens_and_the_marks_of_the_whole(known, name, text, places, whole):
    pieces = known[name]
    assert pieces.cuts
    borders = sorted(min(place, len(text)) for place in places)
    spans = [
        (start, end) for start, end in zip(borders[::2], borders[1::2], strict=False) if start < end
    ]
    pieces.cuts = False
    ids, marks = pieces.tokenize(text, spans, whole)
    pieces.cuts = True
    for _ in range(2):  # when its pieces are not known, and when they are
        same, again = pieces.tokenize(text, spans, whole)
        assert same.tolist() == ids.tolist() and again.tolist() == marks.tolist()


def test_what_is_known_has_a_bound(known, monkeypatch):
    monkeypatch.setattr("lema.data.chat.pieces._MOST", 8)
    pieces = known["gpt2"]
    pieces.tokenize(" ".join(map(str, range(100))) + " " + "long" * 99, [], True)
    assert 0 < len(pieces) <= 8 and max(map(len, pieces)) <= 32


REFUSED = {
    "its words begin with a space that is put there": lambda trained: made(
        trained, [], add_prefix_space=True
    ),
    "nothing cuts at blanks": lambda trained: made(trained, [split(r"\p{N}{1,3}")]),
    "a part holds a space within it": lambda trained: made(trained, [split(r"\p{L}+ \p{L}+|\s+")]),
    "what is between the matches is cut by another rule": lambda trained: made(
        trained, [split(EXPRESSIONS["qwen2"], invert=True)]
    ),
    "a class that may hold a space": lambda trained: made(
        trained, [split(r"[^\p{L}]+|\p{L}+|\s+")]
    ),
    "an alternative looks behind": lambda trained: made(trained, [split(r"(?<=a) \p{L}+|\s+")]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_texts_of_another_tokenizer_are_not_cut(trained, why):
    assert not Pieces(PreTrainedTokenizerFast(tokenizer_object=REFUSED[why](trained))).cuts


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("a b"),
        AddedToken("<x>", rstrip=True),
        AddedToken("<x>", lstrip=True),
        AddedToken("x", single_word=True),
    ],
)
def test_a_token_that_reaches_over_a_border_forbids_pieces(trained, token):
    backend = made(trained, [])
    backend.add_tokens([token])
    assert not Pieces(PreTrainedTokenizerFast(tokenizer_object=backend)).cuts


def test_a_part_that_is_written_in_python_forbids_pieces(trained):
    class Own:
        def pre_tokenize(self, text):
            pass

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained))
    assert Pieces(tokenizer).cuts
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert not Pieces(tokenizer).cuts


def test_a_piece_begins_at_each_space_that_follows_no_blank():
    for text in ("a b", " a\n b  c ", "\n \n", "a\u3000 b", "  "):
        found = _PIECE.findall(text)
        assert "".join(found) == text
        assert all(
            re.search(r"\S\Z", before) and after[0] == " " for before, after in pairwise(found)
        )


def test_a_tokenizer_of_no_parts_forbids_pieces(trained):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    assert not Pieces(tokenizer).cuts
