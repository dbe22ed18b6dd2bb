"""The optimizer steps of a phase: how many its tokens make, and how many rows each process takes in one."""

from __future__ import annotations

from dataclasses import dataclass

from lema.errors import ConfigError

__all__ = ["GlobalBatch", "TokenSteps", "solve_batch", "steps_of"]


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of a step: `rows == micro_batch_size * accumulation * num_processes`, where each accumulates so many."""

    rows: int
    micro_batch_size: int
    accumulation: int
    num_processes: int


def solve_batch(rows: int, per_device: int | None = None, num_processes: int = 1) -> GlobalBatch:
    """Divide a global batch of `rows` exactly: the largest micro-batch, of at most `per_device`, that leaves nothing
    over.

    Raises `ConfigError` where a number is below 1, or the rows cannot be divided; names the nearest that can.
    """
    for key, number in (("batch_size", rows), ("micro_batch_size", per_device), ("processes", num_processes)):
        if number is not None and number < 1:
            raise ConfigError(f"{key} must be at least 1, not {number}", where=key, how="give a whole number from 1 on")
    share, over = divmod(rows, num_processes)
    if over:
        near = [str(count * num_processes) for count in (share, share + 1) if count]
        what = f"{rows} rows cannot be divided among {num_processes} processes"
        how = f"set it to {' or '.join(near)}, or run another number of processes"
        raise ConfigError(what, where="batch_size", how=how)
    largest = min(share, per_device or share)
    micro_batch_size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return GlobalBatch(rows, micro_batch_size, share // micro_batch_size, num_processes)


@dataclass(frozen=True)
class TokenSteps:
    """The whole optimizer steps that tokens make, the tokens they take (padding included), and those left over."""

    steps: int
    tokens: int
    leftover: int


def steps_of(tokens: int, rows: int, block: int) -> TokenSteps:
    """Return the whole steps in tokens, each of so many rows of `block`: `tokens // (rows * block)`, never one more.

    Numbers of tokens are round, and a step's seldom divides them: 10**9 are 3814.7 steps of 512 rows of 512. So what is
    less than a step is left out, and is told, rather than refused or trained on. It is not added to the next phase,
    since the steps of a phase follow from its own settings. `ConfigError` where they do not make one step.
    """
    step = rows * block
    steps, leftover = divmod(tokens, step)
    if steps < 1:
        what = f"{tokens} tokens do not make one step, which is {rows} rows x {block} = {step} tokens"
        how = f"give at least {step} tokens, or lower batch_size or the length of a row"
        raise ConfigError(what, where="tokens", how=how)
    return TokenSteps(steps, steps * step, leftover)
