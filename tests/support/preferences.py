"""Examples of preferences, and their losses on the whole model, written down by hand."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from peft import PeftModel
from tiny import VOCABULARY
from torch import Tensor
from torch.nn.functional import logsigmoid

from lema.data.dataset import Columns, TokenDataset
from lema.data.files import Row
from lema.data.preference import PreferenceDataset

# of the prompt, and of the two rows with it
LENGTHS = ((9, 12, 10), (4, 11, 13), (6, 9, 8), (5, 13, 9))


def examples(*, labelled: bool = False, seed: int = 2) -> PreferenceDataset:
    """Draw four pairs, or eight rows of which every other is desirable."""
    draw = torch.Generator().manual_seed(seed)
    columns = Columns()
    for number, (prompt, *rows) in enumerate(LENGTHS):
        begins = torch.randint(3, VOCABULARY, (prompt,), generator=draw).tolist()
        for length in rows:
            ids = [
                *begins,
                *torch.randint(3, VOCABULARY, (length - prompt + 3,), generator=draw).tolist(),
            ]
            columns.append(Row({}, "made", number), ids, [-100] * prompt + ids[prompt:], cut=[])
    labels = torch.arange(8).remainder(2).eq(0).long().numpy() if labelled else None
    return PreferenceDataset(TokenDataset(columns.table()), labels, 64)


def batch_of(data: PreferenceDataset) -> dict[str, Tensor]:
    """All examples as one batch."""
    return {**data.batch_of(range(len(data)), range(len(data)))}  # type: ignore[dict-item]


def row_logps(model: Any, batch: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return the log-probability of each token with a label, `[rows, sequence - 1]`, 0
    elsewhere.
    """
    seen = {"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    logits = model(input_ids=batch["input_ids"], use_cache=False, **seen).logits[:, :-1].float()
    targets = labels[:, 1:]
    found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found * (targets != -100)


def sums(model: Any, batch: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    part = {
        name.removeprefix(prefix): one for name, one in batch.items() if name.startswith(prefix)
    }
    return row_logps(model, part, part["labels"]).sum(1)


def reference_sums(model: PeftModel, batch: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Sum as the reference does: the adapter `ref`, if there is one, or no adapter."""
    if "ref" not in model.peft_config:
        with torch.no_grad(), model.disable_adapter():
            return sums(model, batch, prefix)
    model.set_adapter("ref", inference_mode=True)
    with torch.no_grad():
        found = sums(model, batch, prefix)
    model.set_adapter("default")
    return found


def dpo(model: PeftModel, batch: Mapping[str, Tensor]) -> Tensor:
    """DPO at beta 0.1, of pairs side by side."""
    ratios = sums(model, batch) - reference_sums(model, batch)
    return -logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()


def kto(model: PeftModel, batch: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        apart = sums(model, batch, "mismatched_") - reference_sums(model, batch, "mismatched_")
    kl = apart.mean().clamp(min=0)
    ratios = sums(model, batch) - reference_sums(model, batch)
    good = batch["example"][:, 2] == 1
    return (1 - torch.sigmoid(0.1 * torch.where(good, ratios - kl, kl - ratios))).mean()


def orpo(model: PeftModel, batch: Mapping[str, Tensor]) -> Tensor:
    """ORPO at beta 0.1."""
    seen = batch["attention_mask"] == 1
    whole = row_logps(model, batch, batch["input_ids"].masked_fill(~seen, -100))
    learnt = batch["labels"][:, 1:] != -100
    means = (whole * learnt).sum(1) / learnt.sum(1)
    odds = means - torch.log1p(-torch.exp(means))
    nll = -whole[::2].sum() / seen[::2, 1:].sum()
    return nll - 0.1 * logsigmoid(odds[::2] - odds[1::2]).mean()


def simpo(model: PeftModel, batch: Mapping[str, Tensor]) -> Tensor:
    """SimPO at beta 0.1 and gamma 0.5."""
    means = sums(model, batch) / (batch["labels"][:, 1:] != -100).sum(1)
    return -logsigmoid(0.1 * (means[::2] - means[1::2]) - 0.5).mean()


BY_HAND: dict[str, Callable[[PeftModel, Mapping[str, Tensor]], Tensor]] = {
    "dpo": dpo,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
}


def parts_of(batch: Mapping[str, Tensor], *rows: int) -> list[dict[str, Tensor]]:
    """Cut a batch into micro-batches of so many rows each."""
    bounds = [0, *torch.tensor(rows).cumsum(0).tolist()]
    return [{name: one[a:b] for name, one in batch.items()} for a, b in pairwise(bounds)]


def together(gradients: Mapping[str, Tensor | None], names: Sequence[str]) -> Tensor:
    return torch.cat([one.flatten() for name in names if (one := gradients[name]) is not None])
