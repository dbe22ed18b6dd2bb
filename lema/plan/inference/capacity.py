"""The size of batches that fit next to the weights within the limits of a run: of texts, and of
rows that are scored.

Texts take keys and values, and rows hidden states, which wait between layers on the device or on
the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from lema.config.units import human_bytes, parse_memory
from lema.engine.head.loss import CHUNK_TOKENS
from lema.errors import MemoryLimitError
from lema.plan.choice import choice_of, cut
from lema.plan.cost import Allocation
from lema.plan.inference.keyvalues import TextBytes, text_bytes
from lema.plan.memory import device_parts, host_parts
from lema.plan.needs import Planner

__all__ = ["RowPlan", "TextPlan", "plan_rows", "plan_texts"]

LOGITS = 3  # copies of a chunk's logits, as fp32
STATES = 2  # of one layer: its input and its output


@dataclass(frozen=True)
class TextPlan:
    """A batch of texts, and its memory."""

    rows: int  # at once
    prompt: int  # tokens of the longest
    new: int  # tokens that are made for each, at most
    host: bool  # keys and values of all layers but one are in host memory
    taken: TextBytes
    allocation: Allocation  # of memory to weights, with that much left for the rest

    def summary(self) -> str:
        """Say what a batch costs."""
        location = "in host memory" if self.host else "on the device"
        return (
            f"{self.rows} at once, prompts of up to {self.prompt:,} tokens and {self.new:,} new: "
            f"{human_bytes(self.taken.keys_values)} of keys and values {location}, "
            f"{human_bytes(self.taken.on_device(host=self.host))} on the device besides weights"
        )


def plan_texts(
    planner: Planner,
    prompt: int,
    new: int,
    *,
    rows: int | None,
    most: int,
    host: bool,
    current_allocation: Allocation | None,
) -> TextPlan:
    """Return the requested batch, or by default the widest that fits.

    The longest prompt has `prompt` tokens, and at most `new` ones are made for each. A batch has
    `rows`; None: as many as there is room for, and no more than `most`. `host`: keys and values of
    all layers but one are in host memory. `current_allocation` is what memory is spent on already;
    None: nothing yet, so the plan chooses it. Raises `MemoryLimitError` where a batch of `rows`, or
    of one, does not fit, which names the batch that does; `ModelError` where what the model
    computes depends on values.
    """
    sized = _sized(planner, prompt, new)
    allocate = _allocator(planner, current_allocation)
    shared = planner.machine_state.machine.shared
    away = host and not shared

    def plan(count: int) -> TextPlan | MemoryLimitError:
        taken = sized.of(count)
        allocation = allocate(taken.on_device(host=away), taken.keys_values if away else 0)
        return (
            allocation
            if isinstance(allocation, MemoryLimitError)
            else TextPlan(count, prompt, new, host, taken, allocation)
        )

    requested = plan(rows or most)
    if isinstance(requested, TextPlan):
        return requested
    fitting = _most_that_fit(plan, rows or most)
    if rows is None and isinstance(widest := plan(max(fitting, 1)), TextPlan):
        return widest
    need = sized.of(rows or 1)
    how = ["request fewer new tokens, or use a shorter prompt"]
    if fitting:
        how = [f"generate {fitting} at once (--batch-size {fitting})"]
    if not host and not shared:
        how.append("keep keys and values in host memory (--kv host)")
    if not fitting and requested.how:
        how.append(requested.how)
    raise MemoryLimitError(
        f"{rows or 1} texts of up to {prompt:,} tokens and {new:,} new ones do not fit: "
        "their keys and values take "
        f"{human_bytes(need.keys_values)}, one pass with them "
        f"{human_bytes(need.on_device(host=away))}",
        where=requested.where,
        how=", or ".join(how),
    )


def _sized(planner: Planner, prompt: int, new: int) -> TextBytes:
    """Return what rows of so many tokens take, of which `new` are made."""
    drawn = planner.blueprint
    chunk = planner.config.chunk_tokens
    return text_bytes(drawn.model, drawn.layers, prompt, new, drawn.parallel, chunk)


@dataclass(frozen=True)
class RowPlan:
    """A pass over the weights that scores rows."""

    rows: int  # of a pass
    at_once: int  # that a layer computes at once
    on_host: bool  # hidden states of all but those wait in host memory
    allocation: Allocation  # of memory to weights, with that much left for the rest


def plan_rows(
    planner: Planner,
    length: int,
    most: int,
    *,
    at_once: int,
    rows: int | None,
    current_allocation: Allocation | None,
) -> RowPlan:
    """Return the pass that scores rows of at most `length` tokens.

    There are `most` rows, of which a layer computes `at_once` at once, if there is room, and a pass
    has `rows`; None: as many as there is room for. `current_allocation` is what memory is spent on
    already; None: nothing yet, so the plan chooses it. Raises `MemoryLimitError` where one row does
    not fit, or not so many of a pass, which names how many do; `ModelError` where what the model
    computes depends on values.
    """
    sized = _sized(planner, length, 1)
    config = planner.blueprint.model.config.get_text_config()
    row = STATES * length * config.hidden_size * planner.blueprint.model.dtype.itemsize
    logits = LOGITS * (planner.config.loss_chunk_tokens or CHUNK_TOKENS) * config.vocab_size * 4
    allocate = _allocator(planner, current_allocation)
    shared = planner.machine_state.machine.shared

    def plan(count: int, together: int) -> RowPlan | MemoryLimitError:
        taken = sized.of(together)
        working_bytes = max(taken.peak - taken.keys_values, logits)
        allocation = allocate(working_bytes + count * row, 0)
        on_host = False
        if isinstance(allocation, MemoryLimitError) and not shared:
            allocation = allocate(working_bytes + together * row, count * row)
            on_host = True
        return (
            allocation
            if isinstance(allocation, MemoryLimitError)
            else RowPlan(count, together, on_host, allocation)
        )

    together = min(at_once, most)
    while isinstance(plan(together, together), MemoryLimitError) and together > 1:
        together //= 2
    requested = plan(min(rows or most, most), together)
    if isinstance(requested, RowPlan):
        return requested
    fitting = _most_that_fit(lambda count: plan(count, together), rows or most)
    if rows is None and isinstance(widest := plan(max(fitting, 1), together), RowPlan):
        return widest
    raise MemoryLimitError(
        (
            f"hidden states of {rows or 1} rows of up to {length:,} tokens do not fit: "
            f"{human_bytes((rows or 1) * row)}"
        ),
        where=requested.where,
        how=f"score {fitting} in a pass (--rows-per-pass {fitting})"
        if fitting
        else requested.how or "shorten the rows",
    )


def _most_that_fit(plan: Callable[[int], object], fewer_than: int) -> int:
    """Return the largest number for which there is a plan and no MemoryLimitError; 0: not even 1
    fits.
    """
    counts = range(1, fewer_than)
    return bisect_left(counts, True, key=lambda count: isinstance(plan(count), MemoryLimitError))


def _allocator(
    planner: Planner, current_allocation: Allocation | None
) -> Callable[[int, int], Allocation | MemoryLimitError]:
    """Return what tells, of bytes on the device and on the host, what weights get beside them, or
    why nothing fits. Processes of a group ask together, and get the room of the least of them."""
    planner = planner.unlimited() if planner.config.device_memory == "auto" else planner
    config = planner.config
    machine_state = planner.machine_state
    shared = machine_state.machine.shared
    available = machine_state.host_available
    total = machine_state.machine.device_memory
    in_pieces = (
        planner.blueprint.head.asked
        if current_allocation is None
        else current_allocation.pieces > 0
    )
    # Whole unless the settings ask for pieces, because each token would read all of them once more.
    planner = cut(planner, replace(choice_of(planner), head_in_pieces=in_pieces))
    adapters = sum(
        parameter.nbytes
        for parameter in planner.blueprint.model.parameters()
        if parameter.requires_grad
    )
    lowest = len(planner.blueprint.layers) - 1  # because nothing is kept for a backward
    weights = replace(planner.demand(), adapter_bytes=adapters, lowest=lowest)
    host = available
    # otherwise the available memory is without its share already
    if config.host_memory is not None and current_allocation is None:
        host = parse_memory(config.host_memory, machine_state.machine.host_memory)
    device = host if shared else total  # 0: unknown
    if config.device_memory is not None:
        device = parse_memory(config.device_memory, total) or device

    def fit(on_device: int, on_host: int) -> Allocation | MemoryLimitError:
        demand = replace(weights, working_bytes=on_device)
        allocation = current_allocation
        if allocation is None:
            try:
                allocation = planner.allocation(demand)
            except MemoryLimitError as error:
                return error
        there = sum(device_parts(demand, allocation).values())
        if shared and config.device_memory is None and current_allocation is not None:
            there = on_device  # what weights have is no longer available
        if device and there > device:
            return MemoryLimitError(
                "the device's memory is too small", where=_where(config.device_memory, "device")
            )
        host_bytes = (
            0 if current_allocation is not None else sum(host_parts(demand, allocation).values())
        )
        if on_host * demand.processes + host_bytes > host:
            return MemoryLimitError(
                "host memory is too small", where=_where(config.host_memory, "host")
            )
        return allocation

    return fit


def _where(setting: object, what: str) -> str:
    return f"the memory of the {what}" if setting is None else f"{what}_memory"
