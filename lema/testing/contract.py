"""Every promise of a device backend, as one class of tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lema.backend import Backend, Upload
from lema.stream.placement import PAGE
from lema.testing.step import publish, steps_of_both

__all__ = ["BackendContract"]

SLOT = 4 * PAGE


class BackendContract:
    """Every promise of `lema.backend.Backend`, one test each.

    Attributes:
        tolerance: largest difference allowed between a streamed training step and the same step of the whole model on
            the same device, relative to the largest number of the tensor compared; 0 asks for equal bits.
        half_dtypes: half-precision dtypes of weights that the backend computes with.
        busy_matmuls: how much work is queued ahead of a read, so that a device with a queue falls behind its host.
    """

    tolerance: ClassVar[float] = 0.0
    half_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    busy_matmuls: ClassVar[int] = 4

    def backend(self) -> Backend:
        """Open the backend under test."""
        raise NotImplementedError("say which backend to test")

    def model_config(self) -> PreTrainedConfig:
        """Return the config of a small causal language model, of at least four layers and 64 positions."""
        raise NotImplementedError("say which model to train one step of")

    # What it is

    def test_it_is_a_backend(self) -> None:
        """It has every member of the protocol, a name, and a device that tensors live on."""
        with closing(self.backend()) as backend:
            assert isinstance(backend, Backend), f"{backend!r} lacks members of lema.backend.Backend"
            assert isinstance(backend.name, str) and backend.name, "a backend has a name"
            assert isinstance(backend.device, torch.device)
            assert torch.ones(2, device=backend.device).device.type == backend.device.type

    def test_it_opens_again_after_it_was_closed(self) -> None:
        """`close` gives back what the constructor took."""
        for _ in range(2):
            with closing(self.backend()) as backend:
                backend.end_step()
                backend.synchronize()

    # Host buffers and slots

    def test_host_buffers_are_exact_aligned_and_writable(self) -> None:
        """`host_buffer` is uint8 `[nbytes]` on the host, begins at a page, and belongs to its caller alone."""
        with closing(self.backend()) as backend:
            sizes = (0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 17)
            buffers = [backend.host_buffer(size) for size in sizes]
            for number, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
                assert buffer.dtype == torch.uint8 and tuple(buffer.shape) == (size,), f"{size} bytes were asked for"
                assert buffer.device.type == "cpu", "a host buffer is on the host"
                assert buffer.untyped_storage().nbytes() < size + PAGE, f"{size} bytes were asked for, more are held"
                assert not size or buffer.data_ptr() % PAGE == 0, "a host buffer begins at a page"
                buffer.numpy()[:] = number  # as a reader writes, past torch
            for number, buffer in enumerate(buffers):
                assert bool((buffer == number).all()), "host buffers share memory"

    def test_compute_queued_after_wait_sees_the_bytes(self) -> None:
        """A source as large as the slot, and smaller ones; the slot can be viewed as any dtype."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 2)
            for number, size in enumerate((SLOT, SLOT - PAGE, 8, SLOT)):
                source = _source(backend, number, size)
                upload = slots.upload(source)
                slot = upload.wait()
                assert slot.dtype == torch.uint8 and slot.dim() == 1 and size <= slot.numel() <= SLOT
                assert slot.device.type == backend.device.type, "a slot is on the device"
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    viewed = slot[:size].view(dtype)
                    assert torch.equal((viewed + 0).cpu(), source.view(dtype)), f"the bytes differ, read as {dtype}"
                _give_back(upload)

    def test_there_may_be_many_more_uploads_than_slots(self) -> None:
        """A ring goes round."""
        with closing(self.backend()) as backend:
            for count in (1, 2, 3):
                slots = backend.device_slots(SLOT, count)
                for number in range(3 * count + 1):
                    source = _source(backend, number)
                    upload = slots.upload(source)
                    assert torch.equal(_read(upload.wait()), source), f"upload {number} of a ring of {count}"
                    _give_back(upload)

    def test_as_many_uploads_are_held_as_there_are_slots(self) -> None:
        """Uploads begin before the ones ahead of them are waited for, and end in any order."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 3)
            for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
                sources = [_source(backend, number + 10 * order[0]) for number in range(3)]
                uploads = [slots.upload(source) for source in sources]
                held = [uploads[number].wait() for number in range(3)]
                for number in order:
                    assert torch.equal(_read(held[number]), sources[number]), f"slot {number} of 3 held"
                    _give_back(uploads[number])

    def test_a_refill_does_not_disturb_a_slot_that_is_held(self) -> None:
        """One slot stays on lease while the others go round, some of them given back before anyone waited."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 3)
            source = _source(backend, 1)
            held = slots.upload(source)
            slot = held.wait()
            for number in range(2, 8):
                first, second = slots.upload(_source(backend, number)), slots.upload(_source(backend, number + 50))
                first.wait()
                _give_back(second)
                _give_back(first)
                assert torch.equal(_read(slot), source), "the slot on lease changed"
            _give_back(held)

    def test_a_slot_is_refilled_only_after_the_compute_queued_before_release(self) -> None:
        """`release` may return at once; work queued under the lease still reads the lease's bytes."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 1)
            sources = [_source(backend, number) for number in range(3)]
            results = []
            for source in sources:
                upload = slots.upload(source)
                results.append(self._late_read(backend, upload.wait()))
                upload.release()
            for number, (result, source) in enumerate(zip(results, sources, strict=True)):
                assert torch.equal(result.cpu(), source.float()), f"work under lease {number} read another's bytes"

    def test_a_released_slot_may_be_leased_again_until_it_is_refilled(self) -> None:
        """The bytes are still there, and work queued under every lease is waited for before a refill."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 1)
            sources = [_source(backend, number) for number in range(3)]
            results = []
            for source in sources:
                upload = slots.upload(source)
                for _ in range(3):
                    results.append((self._late_read(backend, upload.wait()), source))
                    upload.release()
            for number, (result, source) in enumerate(results):
                assert torch.equal(result.cpu(), source.float()), f"lease {number % 3} of upload {number // 3}"

    def test_rings_share_nothing(self) -> None:
        """As many uploads are held as there are rings of one slot, whatever becomes of the others."""
        with closing(self.backend()) as backend:
            rings = [backend.device_slots(SLOT, 1) for _ in range(3)]
            sources = [_source(backend, number) for number in range(3)]
            uploads = [ring.upload(source) for ring, source in zip(rings, sources, strict=True)]
            held = [upload.wait() for upload in uploads]
            _give_back(uploads[1])
            rings[1].upload(_source(backend, 9)).wait()
            for number in (0, 2):
                assert torch.equal(_read(held[number]), sources[number]), f"the slot of ring {number} changed"

    def test_a_drained_source_may_be_overwritten(self) -> None:
        """After `release` and `drained`, called from another thread, the source is free and the work unharmed."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 2)
            source = backend.host_buffer(SLOT)
            reads = []
            for number in range(4):
                source.copy_(_source(backend, number))
                upload = slots.upload(source)
                if number != 2:  # one upload is given back unread
                    reads.append((self._late_read(backend, upload.wait()), source.float()))
                _give_back(upload)
                _drain(upload)  # it may be asked twice
                source.fill_(0xFF)
            for result, expected in reads:
                assert torch.equal(result.cpu(), expected), "what was waited for changed with its source"

    def _late_read(self, backend: Backend, slot: Tensor) -> Tensor:
        """Queue work, and behind it a read of the slot."""
        ones = torch.ones(512, 512, device=backend.device)
        for _ in range(self.busy_matmuls):
            ones = ones @ ones / 512  # ones still
        return slot.float() * ones[0, 0]

    # Compute

    def test_a_generator_state_brings_dropout_back(self) -> None:
        """`rng_state` is a copy; `set_rng_state` makes the device draw the same again."""
        with closing(self.backend()) as backend:
            ones = torch.ones(4096, device=backend.device)
            state = backend.rng_state()
            first, second = (nn.functional.dropout(ones, 0.5).cpu() for _ in range(2))
            assert not torch.equal(first, second), "dropout draws the same without being told to"
            after = backend.rng_state()
            backend.set_rng_state(state)
            assert torch.equal(nn.functional.dropout(ones, 0.5).cpu(), first)
            assert torch.equal(nn.functional.dropout(ones, 0.5).cpu(), second)
            assert torch.equal(backend.rng_state(), after)
            assert not torch.equal(state, after), "a state changed after it was returned"

    def test_autocast_computes_in_the_dtype_of_the_weights(self) -> None:
        """fp32 input times half-precision weight is half precision, with an fp32 gradient for the input."""
        with closing(self.backend()) as backend:
            for dtype in self.half_dtypes:
                weight = torch.randn(16, 8, device=backend.device).to(dtype)
                inputs = torch.randn(4, 8, device=backend.device, requires_grad=True)
                with backend.autocast(dtype):
                    product = nn.functional.linear(inputs, weight)
                assert product.dtype == dtype
                product.float().sum().backward()
                assert inputs.grad is not None and inputs.grad.dtype == torch.float32
                assert (inputs @ weight.float().T).dtype == torch.float32, "autocast did not end with its block"

    def test_autocast_to_float32_changes_nothing(self) -> None:
        """Full-precision weights compute as they are."""
        with closing(self.backend()) as backend:
            weight, inputs = (torch.randn(16, 16, device=backend.device) for _ in range(2))
            plain = inputs @ weight
            with backend.autocast(torch.float32):
                product = inputs @ weight
            assert product.dtype == torch.float32 and torch.equal(product.cpu(), plain.cpu())

    def test_memory_is_reported_in_bytes(self) -> None:
        """What is used is at most the peak, and fits the device; the peak never sinks."""
        with closing(self.backend()) as backend:
            before = backend.memory()
            block = torch.ones(4 << 20, dtype=torch.uint8, device=backend.device)
            backend.synchronize()
            during = backend.memory()
            assert int(block[-1]) == 1
            for memory in (before, during):
                assert 0 <= memory.used <= memory.peak, f"used {memory.used}, peak {memory.peak}"
                assert memory.total > 0 and memory.used <= memory.total, f"used {memory.used} of {memory.total}"
            assert during.peak >= before.peak

    # The group

    def test_the_group_gathers_in_rank_order_and_sums_gradients(self) -> None:
        """`gather` returns one tensor per rank; a parameter without a gradient stays without."""
        with closing(self.backend()) as backend:
            parallel, device = backend.parallel, backend.device
            assert 0 <= parallel.rank < parallel.size
            gathered = parallel.gather(torch.full((3,), float(parallel.rank), device=device))
            assert [tensor.tolist() for tensor in gathered] == [[float(rank)] * 3 for rank in range(parallel.size)]
            replicated, unused = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
            replicated.grad = torch.full((3,), parallel.rank + 1.0, device=device)
            parallel.reduce_gradients([replicated, unused])
            assert replicated.grad.tolist() == [parallel.size * (parallel.size + 1) / 2] * 3
            assert unused.grad is None

    def test_a_group_of_one_leaves_a_layer_whole(self) -> None:
        """There is nobody to share with."""
        with closing(self.backend()) as backend:
            layer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
            before = {name: value.clone() for name, value in layer.state_dict().items()}
            if backend.parallel.size == 1:
                backend.parallel.shard(layer)
                after = layer.state_dict()
                assert after.keys() == before.keys()
                assert all(torch.equal(after[name], before[name]) for name in before)

    # All of it

    def test_a_training_step_is_that_of_the_whole_model(self, tmp_path: Path) -> None:
        """Loss, adapter gradients and AdamW's step, kept graph or recomputed, against PEFT on the same device."""
        published = publish(self.model_config(), tmp_path)
        for recompute, dropout, num_batches in ((True, 0.1, 1), (True, 0.0, 2), (False, 0.0, 2)):
            step = steps_of_both(self.backend(), published, recompute, dropout, num_batches)
            for what, found, expected in step:
                self._compare(what, found.cpu(), expected.cpu())

    def _compare(self, what: str, found: Tensor, expected: Tensor) -> None:
        assert bool(expected.any()), f"{what} is zero, which proves nothing"
        if self.tolerance == 0:
            assert torch.equal(found, expected), f"{what} differs, by {float((found - expected).abs().max()):.3g}"
        else:
            difference = float((found - expected).abs().max() / expected.abs().max())
            assert difference <= self.tolerance, f"{what} differs by {difference:.3g} of its largest number"


def _source(backend: Backend, number: int, size: int = SLOT) -> Tensor:
    """Fill a host buffer with bytes that no other number gives; read as floats they are numbers, not NaN."""
    buffer = backend.host_buffer(size)
    generator = torch.Generator().manual_seed(number)
    buffer.copy_(torch.randint(1, 64, (size,), dtype=torch.uint8, generator=generator))
    return buffer


def _read(slot: Tensor) -> Tensor:
    return slot.clone().cpu()


def _give_back(upload: Upload) -> None:
    upload.release()
    _drain(upload)


def _drain(upload: Upload) -> None:
    """Call `drained` as the core does, from a thread that reads."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(upload.drained).result()
