"""What persons may choose on the planner's page: combinations in which every choice comes with others."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from lema.config.objective import OBJECTIVES
from lema.plan.machine import PROFILES
from plannerpage.write import CARDS

__all__ = ["combinations"]

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
        model = models[name]
        card = draw.choice(CARDS)
        length = int(draw.choice(list(model["work"])))
        objective = draw.choice(["sft", *OBJECTIVES])
        yield {
            "model": name,
            "form": draw.choice(list(model["forms"])),
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
