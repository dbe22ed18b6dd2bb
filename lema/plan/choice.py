"""The choice of how much a step computes and leases at once, as far as the settings leave it open.

`candidates` has what may be chosen, in the order of preference, and `best` takes of it what fits
the limits, and then what is fastest. What memory goes to with each candidate is an `Allocation`,
which `lema.plan.allocate` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from lema.backend.registry import has_addresses
from lema.errors import ConfigError, MemoryLimitError
from lema.model.layers.tiles import TILES
from lema.model.skeleton import main_dtype
from lema.plan.allocate import layers_stay, untimed, whether_recomputed
from lema.plan.blueprint import Blueprint
from lema.plan.cost import seconds
from lema.plan.needs import Planner
from lema.plan.work.long_rows import LONGEST, in_proportion
from lema.plan.work.step import StepShape, Timings, by_arithmetic, rows_each
from lema.plan.work.workload import Workload

__all__ = ["Choice", "best", "candidates", "choice_of", "cut", "seconds_decide", "with_work"]


ENOUGH = 512  # tokens of a micro-batch: one of fewer computes slower than its tokens tell
WORTH_IT = 0.98  # of the seconds of a step: less at once has to be that much faster
# tokens of smaller chunks of the loss: the first may make a step faster, both may make it fit
LESS = (256, 64)
# groups of a layer: rather than use more, run the part before the experts again, so that less waits
FEW_GROUPS = 8
SETTING = "experts_per_slot"
SMALLEST = 256  # tokens of a chunk or a tile: those of fewer compute slower than they tell
LARGE = 2048  # tokens of a chunk: products of fewer are slower than profiles and timings tell


@dataclass(frozen=True)
class Choice:
    """How much a step computes and leases at once."""

    rows: int  # of a micro-batch
    chunk_tokens: int | None  # of which logits exist at once; None: as many as without a plan
    head_in_pieces: bool = False  # whether the head is leased in pieces; else the device holds it
    experts: int = 0  # of a layer that are leased together; 0: all layers are whole
    # whether what such a layer has before its experts is run twice in the backward
    runs_again: bool = False
    chunk: int | None = None  # tokens that go through a layer at once; None: all of a row
    tile: int | None = None  # tokens of which MLPs run at once; None: all


def choice_of(planner: Planner) -> Choice:
    """Return what a planner's steps compute and lease at once."""
    return Choice(
        planner.shape.micro_batch.rows,
        planner.config.loss_chunk_tokens,
        bool(planner.blueprint.head_in_pieces),
        planner.blueprint.experts,
        planner.blueprint.runs_again,
        planner.shape.micro_batch.chunk,
        planner.shape.micro_batch.tile,
    )


def cut(planner: Planner, choice: Choice) -> Planner:
    """Return the planner of the same steps, cut as chosen.

    Raises:
        ConfigError: experts are stored in a form that cannot be cut.
    """
    blueprint = _in_groups(planner.blueprint, choice.experts, runs_again=choice.runs_again)
    blueprint = _with_head(blueprint, in_pieces=choice.head_in_pieces)
    micro_batch = replace(
        planner.shape.micro_batch, rows=choice.rows, chunk=choice.chunk, tile=choice.tile
    )
    longer = choice.rows / planner.shape.micro_batch.rows
    planner = replace(
        planner,
        blueprint=blueprint,
        config=planner.config.model_copy(update={"loss_chunk_tokens": choice.chunk_tokens}),
        timings=None if planner.timings is None else planner.timings.times(longer),
        shape=StepShape(micro_batch, planner.shape.num_rows),
    )
    return (
        planner
        if planner.workload is None
        else replace(planner, workload=planner.work(micro_batch))
    )


def _in_groups(blueprint: Blueprint, experts: int, *, runs_again: bool) -> Blueprint:
    """Return the blueprint with so many experts of a layer in a group; 0: layers are whole."""
    if (experts, runs_again) == (blueprint.experts, blueprint.runs_again):
        return blueprint
    parts = blueprint.parts_of(experts) if experts else None
    return replace(blueprint, parts=parts, experts=experts, runs_again=runs_again)


def _with_head(blueprint: Blueprint, *, in_pieces: bool) -> Blueprint:
    """Return the blueprint with its head, if it may be cut, in pieces, or else on the device."""
    head = blueprint.head
    if blueprint.head_in_pieces is in_pieces:
        return blueprint
    if head.module is None:
        return replace(blueprint, head_in_pieces=False)
    outside_bytes = blueprint.outside_bytes
    if in_pieces:
        outside_bytes -= 0 if blueprint.head_in_pieces is None else head.nbytes
    else:
        outside_bytes += head.nbytes
    return replace(
        blueprint,
        head_in_pieces=in_pieces,
        pieces=head.pieces(blueprint.leased) if in_pieces else (),
        outside_bytes=outside_bytes,
    )


def candidates(planner: Planner) -> Iterator[Choice]:
    """Yield what may be chosen, in the order of preference, as far as the settings leave it open.

    Layers are rather whole than in groups of experts, and the head rather whole than in pieces.
    With each of these there are first fewer rows, then fewer logits, and only then rows of fewer
    tokens than are enough.

    Args:
        planner: of steps that are not cut yet, or are to be cut further.

    Yields:
        The choices, of which each needs less memory than the first, or another kind of it.

    Raises:
        ConfigError: something else does not go with the groups of experts that are asked for.
    """
    for experts, runs_again in _expert_groups(planner):
        for in_pieces in _heads(planner.blueprint):
            first = replace(
                choice_of(planner),
                head_in_pieces=in_pieces,
                experts=experts,
                runs_again=runs_again,
            )
            yield from _smaller(planner, first)


def with_work(planner: Planner) -> Planner:
    """Return the planner with what a micro-batch costs. Long rows whose chunks are still to be
    chosen are in the smallest ones meanwhile: as they are, they would take long to run.

    Raises:
        ModelError: it cannot be told.
    """
    batch = planner.shape.micro_batch
    if planner.config.sequence_chunk == "auto" and batch.length > 2 * LONGEST:
        batch = replace(batch, chunk=SMALLEST)
    return replace(planner, workload=planner.work(batch))


def best(planner: Planner) -> Planner:
    """Return the planner of the first candidate that fits, and if seconds are known of a faster
    one; if none fits that of the last, which says so when it is asked for its needs.

    Where the settings leave it open, rows go through layers as they are if any candidate fits so,
    else with MLPs in the largest tiles with which one does. Else they go in the largest chunks with
    which one fits, or if seconds are known in the largest with which a step is about as fast as
    with any: large ones leave less room for layers that stay on the device, and attend to more
    tokens that no token of theirs sees. Keys and values of the layer at work are on the device if a
    candidate fits so, else in host memory if one does only then."""
    if not planner.keys_are_open:
        return _best_sizes(planner)[0]
    on_device, fits = _best_sizes(_with_keys(planner, "device"))
    if fits or planner.workload is None:
        return on_device
    with suppress(ConfigError):  # of layers whose keys cannot wait there
        in_host, fits = _best_sizes(_with_keys(planner, "host"))
        if fits:
            return in_host
    return on_device


def _with_keys(planner: Planner, location: Literal["device", "host"]) -> Planner:
    """Return the planner of the same steps with keys and values on the device or in host memory."""
    micro_batch = replace(planner.shape.micro_batch, host_keys=location == "host")
    return _measured(
        replace(
            planner,
            config=planner.config.model_copy(update={"keys_values": location}),
            shape=replace(planner.shape, micro_batch=micro_batch),
            chooses_keys=True,
        )
    )


def _measured(planner: Planner) -> Planner:
    """Return the planner of changed steps with what they cost, if a planner knows what steps
    cost."""
    return planner if planner.workload is None else with_work(planner)


def _best_sizes(planner: Planner) -> tuple[Planner, bool]:
    """Return what `best` does, with keys and values where the planner has them, and whether it
    fits."""
    config = planner.config
    tiles = config.mlp_tile_tokens == "auto"
    chunks = config.sequence_chunk == "auto" or planner.chooses_chunk
    if not (tiles or chunks):
        chosen, fits = _first_that_fits(planner)
        # of the settings without a limit, what does not fit is told when it does not
        return chosen, fits and (not planner.chooses_keys or _in_memory(chosen))
    if tiles:
        planner = _with_tile(planner, None)
    smallest = None
    if not (chunks and _exceeds(planner)):
        uncut = _with_chunk(planner, None) if chunks else planner
        if (fitting := _fitting(uncut)) is not None:
            return fitting, True
        smallest = uncut
        if tiles and (sizes := _tile_sizes(uncut)):
            if (fitting := _largest(uncut, sizes, _with_tile)) is not None:
                return fitting, True
            smallest = _with_tile(uncut, sizes[0])
    if chunks and (sizes := _sizes(planner.shape.micro_batch.length)):
        if (fitting := _largest(planner, sizes, _with_chunk)) is not None:
            return _fastest_chunks(planner, sizes, fitting), True
        smallest = _with_chunk(planner, sizes[0])
    return _first_that_fits(planner if smallest is None else smallest)[0], False


def _sizes(tokens: int) -> list[int]:
    """Return the powers of two that are fewer than so many tokens."""
    return [1 << power for power in range(SMALLEST.bit_length() - 1, (tokens - 1).bit_length())]


def _tile_sizes(planner: Planner) -> list[int]:
    """Return how many tokens a tile may have; none where nothing in layers works token by token."""
    sizes = _sizes(planner.shape.micro_batch.tokens)
    try:
        if sizes:
            _with_tile(planner, sizes[-1])
    except ConfigError as error:
        if error.where != TILES:
            raise
        return []
    return sizes


def _largest(
    planner: Planner, sizes: Sequence[int], with_size: Callable[[Planner, int], Planner]
) -> Planner | None:
    """Return the planner with the largest of some sizes with which a step fits; None: with none.

    Args:
        planner: of steps without them.
        sizes: the smallest first.
        with_size: returns the planner of the same steps with one.
    """
    low, high = 0, len(sizes)  # of the sizes, as many fit
    largest = None
    while low < high:
        middle = (low + high + 1) // 2
        candidate = _fitting(with_size(planner, sizes[middle - 1]))
        if candidate is None:
            high = middle - 1
        else:
            largest = candidate
            low = middle
    return largest


def _fitting(planner: Planner) -> Planner | None:
    """Return the planner of the first candidate that fits; None: none does."""
    candidate, fits = _first_that_fits(planner)
    return candidate if fits and _in_memory(candidate) else None


def _fastest_chunks(planner: Planner, sizes: Sequence[int], largest: Planner) -> Planner:
    """Return the planner of chunks with which steps take hardly longer than with the fastest ones:
    the largest such ones. Where no seconds are known, these are the largest that fit.

    Args:
        planner: of steps whose chunks are still to be chosen.
        sizes: of chunks.
        largest: of steps in the largest chunks that fit.
    """
    size = largest.shape.micro_batch.chunk
    if planner.timings is None or planner.config.deterministic or size is None:
        return largest
    smaller = [
        _fitting(_with_chunk(planner, candidate))
        for candidate in sizes
        if LARGE <= candidate < size
    ]
    return _fast_enough([*(fitting for fitting in smaller if fitting is not None), largest])


def _with_tile(planner: Planner, tile: int | None) -> Planner:
    """Return the planner of the same steps with MLPs in tiles of a size; None: without."""
    micro_batch = replace(planner.shape.micro_batch, tile=tile)
    return _measured(
        replace(
            planner,
            config=planner.config.model_copy(update={"mlp_tile_tokens": tile}),
            shape=replace(planner.shape, micro_batch=micro_batch),
            timings=None,
            chooses_tile=True,
        )
    )


def _exceeds(planner: Planner) -> bool:
    """Whether long rows are sure not to fit as they are, which is told by shorter ones: what grows
    with the square of their length is not counted."""
    batch = planner.shape.micro_batch
    limit = planner.limits[0] or planner.machine_state.free(planner.processes)
    in_groups = planner.config.experts_per_slot is not None and planner.blueprint.most_experts
    if planner.workload is None or batch.length <= 2 * LONGEST or in_groups:
        return False  # groups of experts take less at once
    rows = min([batch.rows, *_fewer_rows(planner)])
    work = planner.least_work(replace(batch, rows=rows, chunk=None))
    return 0 < limit < max(layer.working_bytes for layer in work.works)


def _fast_enough(planners: Sequence[Planner]) -> Planner:
    """Return the last planner of those whose steps take hardly longer than the fastest one's; where
    no seconds are known, the last of all.

    Args:
        planners: by how much they compute at once.
    """
    if len(planners) == 1 or planners[0].timings is None:
        return planners[-1]
    taken = [_seconds(planner) for planner in planners]
    return [
        planner
        for planner, seconds_taken in zip(planners, taken, strict=True)
        if WORTH_IT * seconds_taken <= min(taken)
    ][-1]


def _with_chunk(planner: Planner, chunk: int | None) -> Planner:
    """Return the planner of the same steps in chunks of a size; None: of whole rows."""
    micro_batch = replace(planner.shape.micro_batch, chunk=chunk)
    work = None if planner.workload is None else planner.work(micro_batch)
    return replace(
        planner,
        config=planner.config.model_copy(update={"sequence_chunk": chunk}),
        shape=replace(planner.shape, micro_batch=micro_batch),
        workload=work,
        timings=_timings_of(planner, work),
        chooses_chunk=True,
    )


def _timings_of(planner: Planner, work: Workload | None) -> Timings | None:
    """Return the seconds of the same rows in other chunks; None: they are not known."""
    if planner.timings is None or planner.workload is None or work is None:
        return None
    state = planner.machine_state
    if state.speeds == "profile":
        itemsize = main_dtype(planner.blueprint.model).itemsize
        return by_arithmetic(work, planner.blueprint.layers, state.machine, itemsize)
    return in_proportion(planner.timings, planner.workload, work)


def _in_memory(planner: Planner) -> bool:
    """Whether a step fits the device where the settings limit it no further."""
    if planner.config.device_memory is not None:
        return True
    free = planner.machine_state.free(planner.processes)
    return not free or sum(planner.needs().device.values()) <= free


def _first_that_fits(planner: Planner) -> tuple[Planner, bool]:
    """Return the planner of the first candidate that fits, or else of the last, and whether it
    does."""
    refused = None  # for lack of host memory, which fewer rows do not help
    candidate = planner
    for choice in candidates(planner):
        leased = (choice.head_in_pieces, choice.experts, choice.runs_again)
        if leased == refused:
            continue
        candidate = cut(planner, choice)
        try:
            candidate.needs()
        except MemoryLimitError as error:
            refused = refused if "device" in error.where else leased
        else:
            fastest = candidate if candidate.timings is None else _fastest(candidate)
            return fastest, True
    return candidate, False


def _fastest(planner: Planner) -> Planner:
    """Return the planner with fewer rows, or fewer logits, at once as long as a step is then
    faster, for what else memory goes to."""
    # Not by seconds that differ from run to run, where sums must not: how many rows they are over
    # groups additions.
    if planner.config.deterministic or not seconds_decide(planner):
        return planner
    fastest = planner
    least = _seconds(planner)
    while quicker := [
        (taken, candidate)
        for candidate in (cut(fastest, choice) for choice in _next_smaller(fastest))
        if (taken := _seconds(candidate)) < WORTH_IT * least
    ]:
        least, fastest = min(quicker, key=lambda pair: pair[0])
    return fastest


def seconds_decide(planner: Planner) -> bool:
    """Return whether a limit of device memory leaves a choice that takes seconds to be known."""
    limit = planner.config.device_memory
    recompute = whether_recomputed(planner.config)
    if limit is None or recompute is False:
        return False
    if planner.config.sequence_chunk is not None:
        # rows as they are, which would be timed, need not fit; nor would chunks be of less
        chunk = planner.shape.micro_batch.chunk
        return planner.chooses_chunk and limit != "auto" and chunk is not None and chunk > LARGE
    if recompute:
        return limit != "auto"
    demand = untimed(planner.demand())
    try:
        allocation = planner.allocation(demand)
    except MemoryLimitError:
        return False
    stay = layers_stay(planner.config, demand, planner.machine_state.free(demand.processes))
    return allocation.recompute or (stay and len(allocation.residents) < len(demand.layers))


def _seconds(planner: Planner) -> float:
    demand = planner.demand()
    return seconds(demand, planner.allocation(demand), planner.machine_state.machine.speeds)


def _smaller(planner: Planner, first: Choice) -> Iterator[Choice]:
    """Yield a choice, and those with less to compute at once."""
    length = planner.shape.micro_batch.length
    counts = [first.rows, *_fewer_rows(planner)]
    enough = max(1, sum(rows * length >= ENOUGH for rows in counts))
    for row_counts in (counts[:enough], *([rows] for rows in counts[enough:])):
        choices = [replace(first, rows=rows) for rows in row_counts]
        yield from choices
        for tokens in LESS:
            yield from (
                replace(choice, chunk_tokens=tokens)
                for choice in choices
                if tokens in _smaller_chunks(cut(planner, choice))
            )


def _next_smaller(planner: Planner) -> Iterator[Choice]:
    """Yield the choices with the next fewer rows, and logits, at once, if both are open and compute
    as fast.
    """
    choice = choice_of(planner)
    for rows in _fewer_rows(planner)[:1]:
        if rows * planner.shape.micro_batch.length >= ENOUGH:
            yield replace(choice, rows=rows)
    for tokens in _smaller_chunks(planner):
        if tokens == LESS[0]:
            yield replace(choice, chunk_tokens=tokens)


def _fewer_rows(planner: Planner) -> list[int]:
    """Return how many rows may be computed at once instead, the most first; none where the settings
    say.
    """
    config = planner.config
    if planner.workload is None or config.micro_batch_size is not None or config.counts_tokens:
        return []
    rows = planner.shape.micro_batch.rows
    row_multiple = rows_each(config)
    counts = list[int]()
    while rows > row_multiple:
        rows = max(row_multiple, rows // 2 // row_multiple * row_multiple)
        counts.append(rows)
    return counts


def _smaller_chunks(planner: Planner) -> list[int]:
    """Return the smaller chunks of the loss with which less memory is taken; none where the
    settings say, or where a layer takes as much as the head.
    """
    work = planner.workload
    if work is None or planner.config.loss_chunk_tokens is not None:
        return []
    if planner.demand().working_bytes <= work.most(0, planner.shape.num_micro_batches):
        return []
    return [tokens for tokens in LESS if tokens < planner.shape.micro_batch.tokens]


def _heads(blueprint: Blueprint) -> tuple[bool, ...]:
    """Return whether the head may be in pieces, or whole, or both."""
    if blueprint.head_in_pieces is not None:
        return (blueprint.head_in_pieces,)
    if blueprint.head.module is None:
        return (False,)
    return (True,) if blueprint.head.asked else (False, True)


def _expert_groups(planner: Planner) -> Iterator[tuple[int, bool]]:
    """Yield how many experts may be leased together, 0 for whole layers, then the largest first or
    what is asked for; and whether what comes before them is run twice, where it would take too much
    while it waits."""
    asked = planner.config.experts_per_slot
    blueprint = planner.blueprint
    if blueprint.head_in_pieces is not None:  # because it has been cut already
        yield blueprint.experts, blueprint.runs_again
        return
    automatic = asked == "auto"
    if (
        asked is None
        or (automatic and planner.config.device_memory is None)
        or blueprint.cut_experts is None
    ):
        yield 0, False
        return
    if automatic:
        yield 0, False
    if why := _why_not_grouped(planner):
        if automatic:
            return
        raise ConfigError(
            f"experts cannot be leased in groups: {why}", where=SETTING, how="set it to null"
        )
    most = blueprint.most_experts
    sizes = (
        [asked]
        if isinstance(asked, int)
        else [most >> halved for halved in range(1, most.bit_length())]
    )
    groups = [(size, False) for size in sizes if not automatic or size * FEW_GROUPS >= most]
    groups += [(size, True) for size in sizes]
    for size, runs_again in groups:
        try:
            blueprint.parts_of(size)
        except ConfigError:
            if automatic:
                return
            raise
        yield size, runs_again


def _why_not_grouped(planner: Planner) -> str:
    """Return why experts cannot be leased in groups; empty: they can."""
    config = planner.config
    blueprint = planner.blueprint
    backend = planner.backend
    keeps_graphs = config.offloading_tier is not None
    model_class = type(blueprint.model).__name__
    without_experts = f"a {model_class} has no stacked experts, once in a layer"
    other_rows = f"objective: {config.objective} has other rows than those that train"
    lacks_addresses = backend is not None and not has_addresses(backend.device)
    reasons = {
        "torch_compile compiles whole layers": config.torch_compile,
        "shard_weights gathers whole layers": config.shard_weights,
        "gradient_checkpointing: false keeps the graphs of whole layers": (
            config.gradient_checkpointing is False
        ),
        "activation_offloading keeps the graphs of whole layers": (
            keeps_graphs and config.activation_offloading != "hidden_states"
        ),
        other_rows: config.objective != "sft",
        "context_parallel_size takes parts of rows through whole layers": (
            config.context_parallel_size is not None
        ),
        without_experts: not blueprint.most_experts,
        "several processes hold the model together": blueprint.parallel.size > 1,
        "weights of the layers train": blueprint.trained is not None,
        "this device compiles every size of what it runs": lacks_addresses,
    }
    return next((what for what, applies in reasons.items() if applies), "")
