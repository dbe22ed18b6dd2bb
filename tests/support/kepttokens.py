"""Files of all kinds of rows, and all that a data set made of them says, to be compared with
another.
"""

import json

import pyarrow as pa

WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "mill",
    "and",
    "under",
    "old",
    "stone",
    "bridge",
    "question",
    "answer",
]


def said(number, count):
    return " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, count))


def chats(count):
    for number in range(count):
        asked = {"role": "user", "content": said(number, 9)}
        yield {"messages": [asked, {"role": "assistant", "content": said(number, 4 + number % 30)}]}


def write_all(write):
    """Files of all kinds, with rows that are cut, dropped, left out, and labelled with other
    tokens.
    """
    labelled = [
        {"input_ids": [5, 6, 7, 8 + n % 40], "labels": [-100, 9, 7, -100]} for n in range(60)
    ]
    prompts = [
        {"prompt": "the river " * (n % 20), "completion": said(n, 8), "weight": n % 2}
        for n in range(70)
    ]
    prompts = [row | {"id": n} for n, row in enumerate(prompts)]
    more = "".join(json.dumps({"text": said(n, 12)}) + "\n" for n in range(200)).encode()
    return [
        write("chats.jsonl", list(chats(120))),
        write("text.txt", "".join(f"{said(n, 12)}\n\n" for n in range(90))),
        write("labelled.json", json.dumps(labelled)),
        write("prompts.jsonl", prompts),
        write("more.jsonl.zst", pa.compress(more, codec="zstd", asbytes=True)),
    ]


def entries(tmp_path):
    return sorted(path for path in (tmp_path / "cache").iterdir())


def all_of(data):
    rows = [
        (row["input_ids"], row["labels"], data.origin(i), data.num_tokens(i))
        for i, row in enumerate(data)
    ]
    return (
        rows,
        data.counts,
        data.fingerprint(),
        data.lengths.tolist(),
        list(data.skipped()),
        data.num_rows_of(),
    )
