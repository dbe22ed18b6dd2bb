"""The examples of the page on activation offloading run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from offloadmodels import ids, tiny_model
from transformers import TrainingArguments

from lema.activations import get_lora_act_offloading_ctx_manager

PAGE = (Path(__file__).parents[2] / "docs" / "activations.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    (text,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    return str(text)


def test_the_loop_runs() -> None:
    model = tiny_model()
    batches = [{"input_ids": ids(number), "labels": ids(number)} for number in range(2)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    names = {"model": model, "batches": batches, "optimizer": optimizer}
    exec(block("activations example"), names)
    counters = names["offloading"].counters  # type: ignore[attr-defined]
    assert counters.moved == counters.restored > 0


def test_operations_are_moved_instead_of_recomputed() -> None:
    model = tiny_model()
    model.enable_input_require_grads()  # type: ignore[operator] # the method of transformers' class
    offloading = get_lora_act_offloading_ctx_manager(model)
    exec(block("operations example"), {"model": model, "offloading": offloading})
    with offloading:
        model(input_ids=ids(), labels=ids()).loss.backward()
    assert offloading.counters.moved == offloading.counters.restored > 0
    offloading.close()


@pytest.mark.slow
def test_the_trainer_runs(tmp_path: Path) -> None:
    rows = [{"input_ids": ids(number)[0], "labels": ids(number)[0]} for number in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_steps=10,
    )
    names = {"model": tiny_model(), "arguments": arguments, "rows": rows}
    exec(block("trainer example"), names)
    assert names["trainer"].activation_offload_context.counters.moved > 0  # type: ignore[attr-defined]


def test_every_row_of_the_comparison_is_on_the_page() -> None:
    def numbers(first: str, last: str | None) -> set[int]:
        return set(range(int(first), int(last or first) + 1))

    for letter, count in (("A", 20), ("B", 9)):
        spans = re.findall(rf"{letter}(\d+)(?:-{letter}(\d+))?", PAGE)
        found = set[int]().union(*(numbers(first, last) for first, last in spans))
        assert found == set(range(1, count + 1)), letter
