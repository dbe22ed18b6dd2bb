"""Files of JSON made wrong: in the values and names they hold, in how these are nested, and byte
by byte.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any

__all__ = ["mutate", "mutate_bytes"]

NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    255,
    4096,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    10**12,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
)
NUMBERS += (-(2**31), -(2**63), -(10**30))
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    " ",
    "\0",
    "a" * 3000,
    "é\u2028",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "true",
    "null",
    "1",
    "x--y",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [1, 2],
    ["a"],
    {"a": {"b": 1}},
)

Place = tuple[Any, Any]  # what holds a value, and the key or number of it


def mutate(
    document: Any, random: Random, words: Sequence[str] = (), keys: Sequence[tuple[str, Any]] = ()
) -> bytes:
    """Return the text of a document with one to three things wrong.

    Args:
        document: JSON; it stays as it is.
        random: what is drawn from.
        words: texts that mean something where the file is read.
        keys: settings that do, with a value each.
    """
    changed = deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        kind = random.random()
        places = list(_places(changed))
        if keys and kind < 0.1:
            key, value = random.choice(keys)
            holder = random.choice(list(_objects(changed)))
            holder[key] = deepcopy(value)
        elif places:
            random.choice(CHANGES)(random.choice(places), random, words)
    raw = json.dumps(changed).encode("utf-8", "surrogatepass")
    if random.random() < 0.15:
        raw = _twice(raw, random)
    return mutate_bytes(raw, random) if random.random() < 0.15 else raw


def mutate_bytes(raw: bytes, random: Random) -> bytes:
    """Return bytes with one of them flipped, cut, doubled, taken away or replaced."""
    at = random.randrange(len(raw)) if raw else 0
    match random.randrange(6):
        case 0:
            return (
                raw[:at] + bytes([raw[at] ^ (1 << random.randrange(8))]) + raw[at + 1 :]
                if raw
                else raw
            )
        case 1:
            return raw[:at]
        case 2:
            return raw[:at] + raw[at + 1 :]
        case 3:
            return raw[:at] + random.randbytes(random.randrange(1, 9)) + raw[at:]
        case 4:
            end = random.randrange(at, len(raw)) if raw else 0
            return raw[:end] + raw[at:end] + raw[end:]
        case _:
            deep = random.choice((b"[", b'{"a":', b"[{", b"9", b"\xef\xbb\xbf"))
            return raw[:at] + deep * random.choice((1, 40, 2000)) + raw[at:]


def _places(value: Any) -> Iterator[Place]:
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for holder, key in _places(value):
        if isinstance(holder[key], dict):
            yield holder[key]


def _number(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    old = holder[key]
    near = [old + 1, old - 1, old * 2, -old, old // 2] if type(old) is int else []
    holder[key] = random.choice([*near, random.choice(NUMBERS), random.choice(FLOATS)])


def _text(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    holder[key] = random.choice([*TEXTS, *words])


def _other(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    holder[key] = deepcopy(random.choice(OTHERS))


def _delete(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    del holder[key]


def _copy(place: Place, random: Random, words: Sequence[str]) -> None:
    """The same value under another name, or once more in a list."""
    holder, key = place
    if isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), deepcopy(holder[key]))
    else:
        holder[_slip(key, random)] = deepcopy(holder[key])


def _rename(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    if isinstance(holder, dict):
        value = holder.pop(key)
        holder[random.choice([_slip(key, random), *TEXTS, *words])] = value


def _wrap(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    for _ in range(random.choice((1, 1, 20, 250))):
        holder[key] = [holder[key]] if random.random() < 0.5 else {str(key): holder[key]}


def _swap_type(place: Place, random: Random, words: Sequence[str]) -> None:
    holder, key = place
    old = holder[key]
    if isinstance(old, str):
        holder[key] = _slip(old, random) if old else 0
    elif isinstance(old, bool) or old is None:
        holder[key] = random.choice((0, 1, "true", [old]))
    elif isinstance(old, int | float):
        holder[key] = random.choice((str(old), float(old) if abs(old) < 1e300 else "1", [old]))
    elif isinstance(old, list):
        random.shuffle(old)


def _slip(word: str, random: Random) -> str:
    at = random.randrange(len(word) + 1)
    return random.choice(
        (word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.upper(), word + "." + word)
    )


def _twice(raw: bytes, random: Random) -> bytes:
    """Give the first name of an object twice."""
    at = raw.find(b'": ', random.randrange(len(raw)))
    start = raw.rfind(b'"', 0, at)
    return (
        raw if at < 0 or start < 0 else raw[:start] + raw[start : at + 1] + b": 1, " + raw[start:]
    )


CHANGES: tuple[Callable[[Place, Random, Sequence[str]], None], ...] = (
    _number, _number, _text, _other, _delete, _copy, _rename, _wrap, _swap_type,
)  # fmt: skip
