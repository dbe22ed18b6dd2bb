"""An oracle for checkpoints: whatever `from_pretrained` and PEFT make of a mutated one, LEMA makes
too, to the bit.

Every case opens a tiny model by LEMA and by `transformers` with PEFT, and compares the loss and
every adapter gradient of a step, the generated tokens, and every tensor of the merged model. Both
refuse it, or one of them does in a way that docs/coverage.md names.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from mutation import Mutation
from mutations import ACCEPTED, REFUSED, TYPES, mutations_of
from oracle import compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
EVERY = [(kind, mutation) for kind in TYPES for mutation in mutations_of(kind)]

pytestmark = [pytest.mark.filterwarnings("ignore")]


def covering() -> Iterator[tuple[str, Mutation]]:
    """Yield every mutation once, each of another type than the one before it where several have
    it.
    """
    kinds: dict[str, list[tuple[str, Mutation]]] = {}
    for kind, mutation in EVERY:
        kinds.setdefault(mutation.name, []).append((kind, mutation))
    for number, cases in enumerate(kinds.values()):
        yield cases[number % len(cases)]


def named(cases: list[tuple[str, Mutation]]) -> list[object]:
    return [pytest.param(kind, mutation, id=f"{kind}: {mutation.name}") for kind, mutation in cases]


def check(kind: str, mutation: Mutation, directory: Path) -> None:
    verdict = compare(kind, mutation, directory)
    assert not verdict.differences
    for told, known in ((verdict.refused, REFUSED), (verdict.accepted, ACCEPTED)):
        for stage, message in told.items():
            assert any(re.search(pattern, message) for pattern in known), f"{stage}: {message}"


@pytest.mark.parametrize(("kind", "mutation"), named(list(covering())[::8]))
def test_some_mutations_are_what_from_pretrained_makes_of_them(
    kind: str, mutation: Mutation, tmp_path: Path
) -> None:
    check(kind, mutation, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "mutation"), named(EVERY))
def test_every_mutation_is_what_from_pretrained_makes_of_it(
    kind: str, mutation: Mutation, tmp_path: Path
) -> None:
    check(kind, mutation, tmp_path)


def test_the_oracle_sees_weights_that_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = oracle._load

    def other(*args: Any, **options: Any) -> Any:
        model = loaded(*args, **options)
        model.model.layers[2].mlp.up_proj.weight.data[0, 0] += 1e-4
        return model

    monkeypatch.setattr(oracle, "_load", other)
    monkeypatch.setattr(
        oracle, "_merged", lambda directory, _: dict(loaded(directory).state_dict())
    )
    found = compare("llama", Mutation("as it is"), tmp_path).differences
    assert {one.partition(":")[0] for one in found} == {"train", "streamed", "merge"}


def test_there_are_enough_of_them() -> None:
    assert len(TYPES) >= 12
    assert len({mutation.name for _, mutation in EVERY}) >= 80
    assert len(EVERY) >= 1000
    assert len({f"{kind}: {mutation.name}" for kind, mutation in EVERY}) == len(EVERY)


@pytest.mark.parametrize("sentence", [*REFUSED.values(), *ACCEPTED.values()])
def test_what_differs_is_on_the_page(sentence: str) -> None:
    assert sentence in re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
