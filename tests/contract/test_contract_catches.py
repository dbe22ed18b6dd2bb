"""The contract is worth passing: for every promise there is a backend that breaks only that one,
and is caught.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Alone, Backend, MemoryStats, SlotLayout
from lema.testing import BackendContract
from lema_cpu import CpuBackend


class Slots:
    """A device with memory of its own, right in every way but the one a subclass changes."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.free = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Any:
        if layout is not None:
            laid = torch.zeros(layout.nbytes, dtype=torch.uint8)
            for span in layout.spans:
                laid[span.slot : span.slot + span.nbytes] = source[
                    span.start : span.start + span.nbytes
                ]
            source = laid
        return Upload(self, source)

    def take(self) -> Tensor:
        return self.free.pop(0)


class Upload:
    def __init__(self, slots: Slots, source: Tensor) -> None:
        self.slots = slots
        self.slot = slots.take()
        self.source = source
        self.copy()

    def copy(self) -> None:
        self.slot[: len(self.source)] = self.source

    def wait(self) -> Tensor:
        # released before, it may be
        self.slots.free = [slot for slot in self.slots.free if slot is not self.slot]
        return self.slot[: len(self.source)]

    def release(self) -> None:
        self.slots.free.append(self.slot)

    def drained(self) -> None: ...


class OneSlotForAll(Slots):
    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__(nbytes, count)
        self.one = self.free[0]

    def take(self) -> Tensor:
        return self.one


class OneSlotForAllRings(Slots):
    shared: ClassVar[list[Tensor]] = []

    def take(self) -> Tensor:
        nbytes = len(super().take())
        if not self.shared or len(self.shared[0]) < nbytes:
            self.shared[:] = [torch.zeros(nbytes, dtype=torch.uint8)]
        return self.shared[0]


class ReleaseClears(Slots):
    """What was given back is gone, though nothing has refilled it."""

    def upload(self, source: Tensor) -> Any:
        class Clearing(Upload):
            def release(self) -> None:
                super().release()
                self.slot.zero_()

        return Clearing(self, source)


class GivesBackAnother(Slots):
    def upload(self, source: Tensor) -> Any:
        class Counted(Upload):
            def release(self) -> None:
                self.slots.free.append(self.slots.free[0] if self.slots.free else self.slot)

        return Counted(self, source)


class NeverGivenBack(Slots):
    def upload(self, source: Tensor) -> Any:
        class Kept(Upload):
            def release(self) -> None: ...

        return Kept(self, source)


class ReleaseClearsAll(Slots):
    """Giving one slot back spoils the others."""

    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__(nbytes, count)
        self.every = list(self.free)

    def upload(self, source: Tensor) -> Any:
        class Clearing(Upload):
            def release(self) -> None:
                super().release()
                for slot in self.slots.every:  # type: ignore[attr-defined]
                    slot.zero_()

        return Clearing(self, source)


class Short(Slots):
    def upload(self, source: Tensor) -> Any:
        class Cut(Upload):
            def copy(self) -> None:
                self.slot[: len(self.source) - 1] = self.source[:-1]

        return Cut(self, source)


class Unlaid(Slots):
    """Takes a layout, and puts the bytes where they are in the source."""

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Any:
        return Upload(self, source if layout is None else source[: layout.nbytes])


class Odd(Slots):
    def __init__(self, nbytes: int, count: int) -> None:
        self.free = [torch.zeros(nbytes + 1, dtype=torch.uint8)[1:] for _ in range(count)]


class Reversed:
    rank = 1
    size = 2

    def shard(self, layer: Any) -> None: ...

    def reduce_gradients(self, parameters: Any) -> None: ...

    def norm(self, parameters: Any) -> Tensor:
        return torch.tensor(5.0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, torch.zeros_like(tensor)]


class Sound(Reversed):
    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [torch.zeros_like(tensor), tensor]


class SumsAll(Sound):
    def reduce_gradients(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= 2


class CountsTwice(Sound):
    def norm(self, parameters: Any) -> Tensor:
        return torch.tensor(50.0).sqrt()


class CopiesWhenWaitedFor(Slots):
    """What is uploaded is looked for when it is waited for; by then it may be gone."""

    def upload(self, source: Tensor) -> Any:
        class Late(Upload):
            def copy(self) -> None:
                self.nbytes, self.kept, self.source = (
                    len(self.source),
                    weakref.ref(self.source),
                    None,
                )

            def wait(self) -> Tensor:
                if (source := self.kept()) is not None:
                    self.slot[: self.nbytes] = source
                return self.slot[: self.nbytes]

        return Late(self, source)


class LandsLate:
    """Copies when somebody waits for it."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.source = source
        self.target = target

    def release(self) -> None: ...

    def landed(self) -> None:
        self.target.copy_(self.source)


class LandsIfReleased(LandsLate):
    """Copies when the source is released, or somebody waits; an upload in between sees what was
    there.
    """

    def release(self) -> None:
        self.landed()


class NeverLands(LandsLate):
    def landed(self) -> None: ...


class Straightens(LandsLate):
    """Lays dimensions out in their own order, whatever order they have in the target."""

    def landed(self) -> None:
        flat = self.target.as_strided((self.target.numel(),), (1,))
        flat.copy_(self.source.reshape(-1))


class Doubled(Alone):
    def sum(self, tensor: Tensor) -> None:
        tensor *= 2


class Speechless(Alone):
    def exchange(self, value: Any) -> list[Any]:
        return []


class Unzeroed(Alone):
    def shared_memory(self, nbytes: int) -> Tensor:
        return super().shared_memory(nbytes).fill_(1)


class KeepsThePart(Alone):
    def gather(self, upload: Any, whole: Tensor) -> Any:
        whole.copy_(upload.wait())
        return self


class GathersTheFirst(Alone):
    """Gathers whatever came first again and again."""

    def gather(self, upload: Any, whole: Tensor) -> Any:
        if not whole.any():
            whole.copy_(upload.wait())
        upload.release()
        return self


def broken(**changes: Any) -> Callable[[], Backend]:
    """A backend that differs from the reference in the members given."""
    made = type("BrokenBackend", (CpuBackend,), changes)
    return lambda: made(poison=True)


def with_slots(slots: type[Slots]) -> Callable[[], Backend]:
    return broken(device_slots=lambda self, nbytes, count: slots(nbytes, count))


def with_download(download: type[LandsLate]) -> Callable[[], Backend]:
    return broken(download=lambda self, source, target: download(source, target))


def with_replicas(replicas: type[Alone]) -> Callable[[], Backend]:
    return broken(replicas=property(lambda self: replicas()))


def with_parallel(parallel: object) -> Callable[[], Backend]:
    return broken(parallel=property(lambda self: parallel))


BREACHES: dict[str, tuple[Callable[[], Backend], str]] = {
    "misaligned": (
        broken(host_buffer=lambda self, n, memory=None: torch.zeros(n + 1, dtype=torch.uint8)[1:]),
        "host_buffers",
    ),
    "rounded up": (
        broken(host_buffer=lambda self, n, memory=None: CpuBackend().host_buffer(1 << 20)[:n]),
        "host_buffers",
    ),
    "too long": (
        broken(host_buffer=lambda self, n, memory=None: CpuBackend().host_buffer(n + 1)),
        "host_buffers",
    ),
    "nameless": (broken(name=""), "it_is_a_backend"),
    "one slot for all": (with_slots(OneSlotForAll), "as_many_uploads_are_open"),
    "refilled while held": (with_slots(OneSlotForAll), "a_refill_does_not_disturb"),
    "another slot given back": (with_slots(GivesBackAnother), "as_many_uploads_are_open"),
    "never given back": (with_slots(NeverGivenBack), "there_may_be_many_more_uploads"),
    "cleared by another's release": (with_slots(ReleaseClearsAll), "a_refill_does_not_disturb"),
    "cut short": (with_slots(Short), "compute_queued_after_wait"),
    "no layout": (with_slots(Unlaid), "a_layout_maps_spans_of_a_source"),
    "odd addresses": (with_slots(Odd), "compute_queued_after_wait"),
    "generator not set": (broken(set_rng_state=lambda self, state: None), "a_generator_state"),
    "generator seeded anew": (
        broken(set_rng_state=lambda self, state: torch.manual_seed(0) and None),
        "a_generator_state",
    ),
    "no autocast": (broken(autocast=lambda self, dtype: nullcontext()), "autocast_computes"),
    "always autocast": (
        broken(autocast=lambda self, dtype: torch.autocast("cpu", dtype=torch.bfloat16)),
        "autocast_to_float32",
    ),
    "used above peak": (broken(memory=lambda self: MemoryStats(2, 1, 3)), "memory_is_reported"),
    "used above total": (broken(memory=lambda self: MemoryStats(4, 4, 3)), "memory_is_reported"),
    "no total": (broken(memory=lambda self: MemoryStats(0, 0, 0)), "memory_is_reported"),
    "gathers in another order": (with_parallel(Reversed()), "the_group_gathers"),
    "sums what is whole": (with_parallel(SumsAll()), "the_group_gathers"),
    "counts copies in a norm": (with_parallel(CountsTwice()), "the_group_gathers"),
    "dropout drawn anew": (broken(set_rng_state=lambda self, state: None), "a_training_step"),
    "weights of another layer": (with_slots(OneSlotForAllRings), "a_training_step"),
    "rings that share a slot": (with_slots(OneSlotForAllRings), "rings_share_nothing"),
    "cleared on release": (with_slots(ReleaseClears), "a_released_slot_may_be_leased_again"),
    "takes other memory": (
        broken(host_buffer=lambda self, n, memory=None: CpuBackend().host_buffer(n)),
        "memory_that_is_given",
    ),
    "a source is not kept": (with_slots(CopiesWhenWaitedFor), "a_source_may_be_dropped"),
    "a download never lands": (with_download(NeverLands), "a_download_sees_the_compute"),
    "dimensions in another order": (with_download(Straightens), "a_download_sees_the_compute"),
    "downloads what is there later": (
        with_download(LandsLate),
        "a_released_source_may_be_overwritten",
    ),
    "uploads overtake downloads": (
        with_download(LandsIfReleased),
        "what_is_uploaded_after_a_download",
    ),
    "adds itself twice": (with_replicas(Doubled), "a_process_alone_is_all"),
    "says nothing": (with_replicas(Speechless), "a_process_alone_is_all"),
    "shares what is not zeroed": (with_replicas(Unzeroed), "a_process_alone_is_all"),
    "the part is not given back": (with_replicas(KeepsThePart), "a_process_alone_gathers"),
    "gathers what it had": (with_replicas(GathersTheFirst), "a_process_alone_gathers"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_caught_by_the_test_of_that_promise(breach: str, tmp_path: Path) -> None:
    factory, promise = BREACHES[breach]

    class Suite(BackendContract):
        def backend(self) -> Backend:
            return factory()

        def model_config(self) -> PreTrainedConfig:
            return LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_hidden_layers=4,
            )

    (name,) = [name for name in dir(Suite) if name.startswith(f"test_{promise}")]
    arguments = [tmp_path] if promise == "a_training_step" else []
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        getattr(Suite(), name)(*arguments)


def test_without_a_backend_or_a_model_the_suite_asks_for_one() -> None:
    with pytest.raises(NotImplementedError, match="which backend"):
        BackendContract().backend()
    with pytest.raises(NotImplementedError, match="which model"):
        BackendContract().model_config()


@pytest.mark.parametrize(
    ("tolerance", "found", "passes"), [(0.0, 2.0, True), (0.0, 2.001, False), (0.01, 2.001, True)]
)
def test_a_tolerance_is_relative_to_the_largest_number(
    tolerance: float, found: float, passes: bool
) -> None:
    class Suite(BackendContract): ...

    Suite.tolerance = tolerance
    expected = torch.tensor([1e-6, 2.0])
    with nullcontext() if passes else pytest.raises(AssertionError, match="the loss differs"):
        Suite()._compare("the loss", torch.tensor([1e-6, found]), expected)
    with pytest.raises(AssertionError, match="proves nothing"):
        Suite()._compare("the loss", torch.zeros(2), torch.zeros(2))
