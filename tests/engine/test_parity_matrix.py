"""What may not change a number, against the whole model, bit by bit.

Every two settings, the architecture being one, in all their combinations; every three, and all, are
`exhaustive`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from covering import Case, cases, covering
from parity import assert_same, draw_b, streamed_model, streamed_step
from tiny import ARCHITECTURES, NUM_LAYERS, micro_batches

from lema.plan.budget import spread
from lema.stream.schedule import fetched, training_order

OPENED = {  # how a model is opened
    "prefetch_depth": (1, 2, 4),
    "strategy": ("streaming", "resident"),
    "residents": (0, NUM_LAYERS // 2, NUM_LAYERS),
    "recompute": ("all", "but products", "some", "none"),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
}
STEPPED = {  # what one step is given
    "count": (1, 4),
    "padding": (False, True),
}
TRIPLES = covering(OPENED, 3)
SOME = frozenset({0, 3, 4, NUM_LAYERS - 2})  # layers that are not recomputed
TARGETS = ("q_proj", "down_proj")  # of the full product: how a layer begins and how it ends


def label(case: Case) -> str:
    return "-".join(f"{name}:{level}" for name, level in case.items())


@pytest.fixture
def compare(checkpoint_of: Any, outcome_of: Any) -> Callable[..., None]:
    def open_and_compare(
        name: str, opened: Case, steps: list[Case], targets: tuple[str, ...] | None = None
    ) -> None:
        tied = opened["tied"]
        dropout = opened["dropout"]
        depth = opened["prefetch_depth"]
        everything = OPENED | STEPPED
        places = [everything[factor].index(level) for factor, level in opened.items()]
        with streamed_model(
            checkpoint_of(name, tied, dropout),
            poison=sum(places) % 2 == 0,  # with and without, whatever any other factor is
            lora_dropout=dropout,
            prefetch_depth=depth,
            strategy=opened["strategy"],
            gradient_checkpointing=opened["recompute"] != "none",
            lora_target_modules=targets,
            spent={
                "residents": frozenset(spread(opened["residents"], NUM_LAYERS)),
                "saved": SOME if opened["recompute"] == "some" else frozenset(),
                "products": frozenset(
                    range(NUM_LAYERS) if opened["recompute"] == "but products" else ()
                ),
            },
        ) as model:
            draw_b(model.lora_manager)
            memory = model.memory
            assert len(memory.residents) == opened["residents"]
            held = memory.residents if opened["strategy"] == "streaming" else range(NUM_LAYERS)
            for number, step in enumerate(steps, start=1):
                streamed = streamed_step(model, micro_batches(**step))
                assert_same(streamed, outcome_of(name, tied, dropout, **step, targets=targets))
                read = fetched(training_order(NUM_LAYERS) * number, depth + 1, held)
                assert memory.counters.layers_read == len(read)

    return open_and_compare


@pytest.mark.exhaustive
@pytest.mark.parametrize("opened", TRIPLES, ids=label)
def test_no_three_settings_change_a_bit(compare: Callable[..., None], opened: Case) -> None:
    compare("llama", opened, cases(STEPPED), TARGETS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "opened", [case for case in cases(OPENED) if case not in TRIPLES], ids=label
)
def test_no_combination_changes_a_bit(compare: Callable[..., None], opened: Case) -> None:
    compare("llama", opened, cases(STEPPED), TARGETS)


@pytest.mark.whole
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", covering({"name": tuple(ARCHITECTURES)} | OPENED | STEPPED, 2), ids=label
)
def test_no_pair_of_settings_changes_a_bit(compare: Callable[..., None], case: Case) -> None:
    opened = {factor: case[factor] for factor in OPENED}
    compare(case["name"], opened, [{factor: case[factor] for factor in STEPPED}])


@pytest.mark.exhaustive
@pytest.mark.parametrize("opened", cases(OPENED), ids=label)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama"])
def test_no_combination_changes_a_bit_elsewhere(
    compare: Callable[..., None], name: str, opened: Case
) -> None:
    compare(name, opened, cases(STEPPED))
