"""How likely tokens are in one pass over the layers: as the whole model says, whatever the rows
are computed with.
"""

from pathlib import Path

import pytest
import torch
from smallrun import (
    NUM_LAYERS,
    opened,
    settings,
    token_rows,
    whole_logits,
    whole_model,
    write_model,
)
from torch import Tensor

from lema.engine.head.likelihood import Likelihood, likelihoods

ROWS = [row["input_ids"] for row in token_rows(12, length=5)]
ASKED = [1 + index % 4 for index in range(12)]  # tokens at the end of each row


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


def micro_batches(rows: int) -> list[dict[str, Tensor]]:
    made = []
    for first in range(0, len(ROWS), rows):
        some = ROWS[first : first + rows]
        asked = ASKED[first : first + rows]
        width = max(map(len, some)) - 1
        ids = torch.zeros(len(some), width, dtype=torch.long)
        labels = torch.full((len(some), width), -100)
        for place, (row, count) in enumerate(zip(some, asked, strict=True)):
            ids[place, : len(row) - 1] = torch.tensor(row[:-1])
            labels[place, len(row) - 1 - count : len(row) - 1] = torch.tensor(row[-count:])
        made.append({"input_ids": ids, "labels": labels})
    return made


def expected(model: torch.nn.Module) -> list[Likelihood]:
    found = []
    for row, count in zip(ROWS, ASKED, strict=True):
        logits = whole_logits(model, torch.tensor([row]))[0, -count - 1 : -1].log_softmax(-1)
        target = torch.tensor(row[-count:])
        value = logits.gather(1, target[:, None]).sum()
        found.append(Likelihood(float(value), bool((logits.argmax(-1) == target).all())))
    return found


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_likelihoods_are_those_of_the_whole_model(base: Path, rows: int, tmp_path: Path) -> None:
    with opened(settings(base, tmp_path, loss_chunk_tokens=3)) as model:
        model.save_pretrained(tmp_path / "adapter")
        model.skeleton.eval()
        before = model.memory.counters.leases
        found = likelihoods(model.adapter, micro_batches(rows))
        # One pass, however many rows; the first tells how the model is cut as well.
        assert model.memory.counters.leases - before == NUM_LAYERS
        assert likelihoods(model.adapter, micro_batches(rows), on_host=True) == found
    truth = expected(whole_model(base, tmp_path / "adapter"))
    assert [one.log_likelihood for one in found] == pytest.approx(
        [one.log_likelihood for one in truth], abs=1e-5
    )
    assert [one.greedy for one in found] == [one.greedy for one in truth]


def test_the_likeliest_tokens_are_known_as_such(base: Path, tmp_path: Path) -> None:
    whole = whole_model(base)
    row = ROWS[0][:4]
    for _ in range(3):
        row = [*row, int(whole_logits(whole, torch.tensor([row]))[0, -1].argmax())]
    labels = torch.tensor([[-100] * 3 + row[4:], [-100] * 3 + [row[4], row[5], (row[6] + 1) % 300]])
    with opened(settings(base, tmp_path), adapter=False) as model:
        model.skeleton.eval()
        found = likelihoods(
            model.adapter, [{"input_ids": torch.tensor([row[:-1]] * 2), "labels": labels}]
        )
    assert [one.greedy for one in found] == [True, False]
    assert found[0].log_likelihood > found[1].log_likelihood
