"""What persons may choose on the planner's page: combinations in which every choice comes with others."""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lema.config.objective import OBJECTIVES
from lema.plan.machine import PROFILES
from plannerpage.hollowforms import FORMS
from plannerpage.modelfacts import LENGTHS
from plannerpage.write import CARDS

__all__ = ["combinations", "pasted"]

GB = 10**9
SEED = 45


def combinations(models: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield so many combinations of a model, its form, a card, memory, a disk, rows and an
    objective; the models in turn, of models with equal tables the first alone. Those of a model do
    not depend on which others there are.
    """
    names = [name for name, facts in models.items() if "same" not in facts]
    for number in range(count):
        name = names[number % len(names)]
        draw = random.Random(f"{SEED} {name} {number // len(names)}")
        yield chosen_of(name, models[name]["work"], models[name]["forms"], draw)


def pasted(kinds: Iterable[str], count: int) -> Iterator[dict[str, Any]]:
    """Yield so many combinations of a config.json with sizes that no published model has."""
    names = list(kinds)
    for number in range(count):
        kind = names[number % len(names)]
        draw = random.Random(f"{SEED} {kind} {number}")
        groups = draw.choice((4, 8, 10))
        heads = groups * draw.choice((1, 2, 4))
        width = draw.choice((64, 128))
        config = {
            "model_type": kind,
            "hidden_size": heads * width,
            "intermediate_size": 128 * draw.randrange(24, 160),
            "num_hidden_layers": draw.randrange(12, 41),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": width,
            "vocab_size": 128 * draw.randrange(250, 1200),
            "max_position_embeddings": 8192,
            "tie_word_embeddings": draw.random() < 0.5,
            "pad_token_id": 0,
        }
        inputs = chosen_of(f"{kind}-{number}", LENGTHS[:5], FORMS, draw)
        yield {**inputs, "config": config}


def chosen_of(
    name: str, lengths: Iterable[Any], forms: Iterable[str], draw: random.Random
) -> dict[str, Any]:
    """Return one combination of a model."""
    card = draw.choice(CARDS)
    length = int(draw.choice(list(lengths)))
    objective = draw.choice(["sft", *OBJECTIVES])
    return {
        "model": name,
        "form": draw.choice(list(forms)),
        "card": card,
        "objective": objective,
        "rank": draw.choice((8, 16, 32, 64, 128)),
        "length": length,
        "rows": max(1 + (objective == "kto"), draw.choice((1, 4, 8, 16, 24, 64))),
        "deviceMemory": int(draw.choice((0.5, 0.9, 1.0)) * PROFILES[card].device_memory),
        "hostMemory": draw.choice((16, 32, 64, 128, 512)) * GB,
        "diskSpeed": draw.choice((0.5, 3.5, 7.0, 14.0)) * GB,
        "dataRows": draw.choice((60, 5_000, 100_000)),
        "dataLength": round(length * draw.choice((0.2, 0.6, 1.0))),
        "epochs": draw.choice((1, 3)),
        "price": draw.choice((0.4, 3.0)),
    }
