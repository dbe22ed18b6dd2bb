"""What long rows cost, from what shorter ones do.

Running a row without values takes time for every operation, and some models take more operations
for longer rows. So rows of two lengths are run, of which one is twice the other. Bytes grow evenly
with the length. Operations of attention grow with its square, and all others evenly.
"""

from __future__ import annotations

from dataclasses import replace

from lema.plan.work.step import LayerSeconds, Timings
from lema.plan.work.workload import LayerWork, MicroBatch, Workload, grown

__all__ = ["in_proportion", "lengthened", "run_length", "timed_batch"]

LONGEST = 2048  # tokens of a row that is run without values
MULTIPLE = 8  # tokens of such a row
TIMED = 2048  # tokens of a row that is timed in the place of longer ones


def run_length(length: int, chunk_tokens: int) -> int:
    """Return the length of the rows that are run in the place of longer ones; rows of twice that
    are run as well, and have a chunk of the loss at least.

    Args:
        length: of a row.
        chunk_tokens: of which logits exist at once.
    """
    most = max(LONGEST, -(-chunk_tokens // 2))
    half = length // 2
    return half if half <= most else -(-most // MULTIPLE) * MULTIPLE


def lengthened(short: Workload, double: Workload, factor: float) -> Workload:
    """Return what a micro-batch costs whose rows are `factor` times as long as those of `short`.

    Args:
        short: what shorter rows cost.
        double: what rows of twice that length cost.
        factor: how many times as long as the short ones they are.
    """
    work: Workload = grown(short, double, factor)
    works = tuple(
        _with_square(*three, factor)
        for three in zip(work.works, short.works, double.works, strict=True)
    )
    # logits are those of a chunk, whatever the length
    head = replace(work.head, working_bytes=double.head.working_bytes)
    return replace(work, works=works, head=head)


def _with_square(even: LayerWork, short: LayerWork, double: LayerWork, factor: float) -> LayerWork:
    """Return a layer's work with operations that grow with the square of the length."""
    forward = _with_square_flops(short.forward, double.forward, factor)
    recompute = _with_square_flops(short.recompute, double.recompute, factor)
    backward = _with_square_flops(short.backward, double.backward, factor)
    return replace(
        even,
        forward=sum(forward),
        recompute=sum(recompute),
        backward=sum(backward),
        square_flops=forward[1] + recompute[1] + backward[1],
    )


def _with_square_flops(once: int, twice: int, factor: float) -> tuple[int, int]:
    """Return the operations of a longer row that grow evenly with it, and with its square."""
    square = max(0.0, (twice - 2 * once) / 2)
    return round((once - square) * factor), round(square * factor**2)


def timed_batch(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch that is timed in the place of one that goes through layers in chunks,
    since such a row as a whole need not fit; of another, itself."""
    if not batch.is_cut:
        return batch
    assert batch.chunk is not None
    return replace(batch, rows=1, length=min(batch.chunk, TIMED), chunk=None)


def in_proportion(timings: Timings, timed: Workload, work: Workload) -> Timings:
    """Return the seconds of a micro-batch that has not been timed: each part takes as many times
    longer as it has more operations.

    Args:
        timings: of the micro-batch that was timed.
        timed: what that costs.
        work: what the other costs.
    """
    pairs = zip(timings.layers, timed.works, work.works, strict=True)
    return replace(
        timings,
        layers=tuple(_longer(seconds, before, after) for seconds, before, after in pairs),
        head=timings.head * work.head.flops / max(1, timed.head.flops),
        prelude=timings.prelude * work.hidden_bytes / timed.hidden_bytes,
    )


def _longer(seconds: LayerSeconds, timed: LayerWork, work: LayerWork) -> LayerSeconds:
    again = work.recompute / max(1, timed.recompute)
    return LayerSeconds(
        seconds.forward * work.forward / max(1, timed.forward),
        seconds.recompute * again,
        seconds.backward * work.backward / max(1, timed.backward),
        seconds.expand,
        seconds.without_products * again,
    )
