"""What micro-batches of many rows take, told from what those of one and of two take."""

from __future__ import annotations

from dataclasses import replace

from lema.plan.workload import HeadWork, LayerWork, Workload

__all__ = ["of_rows"]


def of_rows(one: Workload, two: Workload, rows: int, rows_at_once: int) -> Workload:
    """Return what a micro-batch of `rows` costs in memory: every part grows evenly with them, but for the head.

    Args:
        one: of one row.
        two: of two, as long.
        rows: of the micro-batch.
        rows_at_once: that the head's logits exist for; a micro-batch of more has no more of them.
    """
    return replace(
        one,
        works=tuple(_layer(first, second, rows) for first, second in zip(one.works, two.works, strict=True)),
        head=_head(one.head, two.head, min(rows, rows_at_once)),
        hidden_bytes=_grown(one.hidden_bytes, two.hidden_bytes, rows),
        call_bytes=_grown(one.call_bytes, two.call_bytes, rows),
        prelude_bytes=_grown(one.prelude_bytes, two.prelude_bytes, rows),
    )


def _layer(one: LayerWork, two: LayerWork, rows: int) -> LayerWork:
    return replace(
        one,
        saved_bytes=_grown(one.saved_bytes, two.saved_bytes, rows),
        working_bytes=_grown(one.working_bytes, two.working_bytes, rows),
        forward_bytes=_grown(one.forward_bytes, two.forward_bytes, rows),
    )


def _head(one: HeadWork, two: HeadWork, rows: int) -> HeadWork:
    return replace(one, working_bytes=_grown(one.working_bytes, two.working_bytes, rows))


def _grown(one: int, two: int, rows: int) -> int:
    return one + (rows - 1) * (two - one)
