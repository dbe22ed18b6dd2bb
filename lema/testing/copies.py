"""The promises of a backend about bytes: host buffers, slots, and copies between them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import ClassVar

import torch
from torch import Tensor

from lema.backend import Backend, SlotLayout, Span, Upload
from lema.backend.hostmemory import anonymous
from lema.backend.registry import has_addresses
from lema.stream.placement import PAGE

__all__ = ["SLOT", "CopyPromises", "read", "source_of"]

SLOT = 4 * PAGE


class CopyPromises:
    """Tests of `host_buffer`, `device_slots` and `download`; see
    `lema.testing.contract.BackendContract`.
    """

    busy_matmuls: ClassVar[int] = 4

    def backend(self) -> Backend:
        """Open the backend under test."""
        raise NotImplementedError("say which backend to test")

    def keep_busy(self) -> None:
        """Queue compute that takes much longer than queueing it, if the device has a way to do so;
        by default none.

        Products, of which `busy_matmuls` are queued anyway, are done as fast as they are queued on
        a fast device: it would then never be late, and a missing wait would go unseen.
        """

    def test_host_buffers_are_exact_aligned_and_writable(self) -> None:
        """`host_buffer` is uint8 `[nbytes]` on the host, begins at a page, and belongs to its
        caller alone.
        """
        with closing(self.backend()) as backend:
            sizes = (0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 17)
            buffers = [backend.host_buffer(size) for size in sizes]
            for number, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
                assert buffer.dtype == torch.uint8 and tuple(buffer.shape) == (size,), (
                    f"{size} bytes were asked for"
                )
                assert buffer.device.type == "cpu", "a host buffer is on the host"
                assert buffer.untyped_storage().nbytes() < size + PAGE, (
                    f"{size} bytes were asked for, more are held"
                )
                assert not size or buffer.data_ptr() % PAGE == 0, "a host buffer begins at a page"
                buffer.numpy()[:] = number  # as a reader writes, past torch
            for number, buffer in enumerate(buffers):
                assert bool((buffer == number).all()), "host buffers share memory"

    def test_compute_queued_after_wait_sees_the_bytes(self) -> None:
        """A source as large as the slot, and smaller ones; the slot can be viewed as any dtype."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 2)
            for number, size in enumerate((SLOT, SLOT - PAGE, 8, SLOT)):
                source = source_of(backend, number, size)
                upload = slots.upload(source)
                slot = upload.wait()
                assert (
                    slot.dtype == torch.uint8 and slot.dim() == 1 and size <= slot.numel() <= SLOT
                )
                assert slot.device.type == backend.device.type, "a slot is on the device"
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    viewed = slot[:size].view(dtype)
                    assert torch.equal((viewed + 0).cpu(), source.view(dtype)), (
                        f"the bytes differ, read as {dtype}"
                    )
                _give_back(upload)

    def test_a_layout_maps_spans_of_a_source_to_the_slot(self) -> None:
        """A device that has memory of its own, and addresses, puts bytes of a source to other
        places of the slot.
        """
        with closing(self.backend()) as backend:
            if backend.memory().shared or not has_addresses(backend.device):
                return
            slots = backend.device_slots(SLOT, 1)
            for number in range(3):
                source = source_of(backend, number, SLOT + PAGE)
                spans = (Span(8, 1000, 0), Span(1012, 16, 1024), Span(SLOT, PAGE, 2 * PAGE))
                upload = slots.upload(source, SlotLayout(3 * PAGE + 256, spans))
                slot = read(upload.wait())
                assert slot.shape == (3 * PAGE + 256,), "the slot is not as long as the layout"
                for span in spans:
                    here = slot[span.slot : span.slot + span.nbytes]
                    assert torch.equal(here, source[span.start : span.start + span.nbytes]), (
                        f"{span}"
                    )
                _give_back(upload)

    def test_there_may_be_many_more_uploads_than_slots(self) -> None:
        """A ring goes round."""
        with closing(self.backend()) as backend:
            for count in (1, 2, 3):
                slots = backend.device_slots(SLOT, count)
                for number in range(3 * count + 1):
                    source = source_of(backend, number)
                    upload = slots.upload(source)
                    assert torch.equal(read(upload.wait()), source), (
                        f"upload {number} of a ring of {count}"
                    )
                    _give_back(upload)

    def test_as_many_uploads_are_open_as_there_are_slots(self) -> None:
        """Uploads begin before the ones ahead of them are waited for, and end in any order."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 3)
            for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
                sources = [source_of(backend, number + 10 * order[0]) for number in range(3)]
                uploads = [slots.upload(source) for source in sources]
                leased = [uploads[number].wait() for number in range(3)]
                for number in order:
                    assert torch.equal(read(leased[number]), sources[number]), (
                        f"slot {number} of 3 held"
                    )
                    _give_back(uploads[number])

    def test_a_refill_does_not_disturb_a_leased_slot(self) -> None:
        """One slot stays on lease while the others go round, some of them given back before
        anyone waited.
        """
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 3)
            source = source_of(backend, 1)
            leased = slots.upload(source)
            slot = leased.wait()
            for number in range(2, 8):
                first = slots.upload(source_of(backend, number))
                second = slots.upload(source_of(backend, number + 50))
                first.wait()
                _give_back(second)
                _give_back(first)
                assert torch.equal(read(slot), source), "the slot on lease changed"
            _give_back(leased)

    def test_a_slot_is_refilled_only_after_the_compute_queued_before_release(self) -> None:
        """`release` may return at once; work queued under the lease still reads the lease's
        bytes.
        """
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 1)
            sources = [source_of(backend, number) for number in range(3)]
            results = []
            for source in sources:
                upload = slots.upload(source)
                results.append(self._late_read(backend, upload.wait()))
                upload.release()
            for number, (result, source) in enumerate(zip(results, sources, strict=True)):
                assert torch.equal(result.cpu(), source.float()), (
                    f"work under lease {number} read another's bytes"
                )

    def test_a_released_slot_may_be_leased_again_until_it_is_refilled(self) -> None:
        """The bytes are still there, and work queued under every lease is waited for before a
        refill.
        """
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 1)
            sources = [source_of(backend, number) for number in range(3)]
            results = []
            for source in sources:
                upload = slots.upload(source)
                for _ in range(3):
                    results.append((self._late_read(backend, upload.wait()), source))
                    upload.release()
            for number, (result, source) in enumerate(results):
                assert torch.equal(result.cpu(), source.float()), (
                    f"lease {number % 3} of upload {number // 3}"
                )

    def test_rings_share_nothing(self) -> None:
        """As many uploads are held as there are rings of one slot, whatever becomes of the
        others.
        """
        with closing(self.backend()) as backend:
            rings = [backend.device_slots(SLOT, 1) for _ in range(3)]
            sources = [source_of(backend, number) for number in range(3)]
            uploads = [ring.upload(source) for ring, source in zip(rings, sources, strict=True)]
            leased = [upload.wait() for upload in uploads]
            _give_back(uploads[1])
            rings[1].upload(source_of(backend, 9)).wait()
            for number in (0, 2):
                assert torch.equal(read(leased[number]), sources[number]), (
                    f"the slot of ring {number} changed"
                )

    def test_a_drained_source_may_be_overwritten(self) -> None:
        """After `release` and `drained`, called from another thread, the source is free and the
        work unharmed.
        """
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 2)
            source = backend.host_buffer(SLOT)
            reads = []
            for number in range(4):
                source.copy_(source_of(backend, number))
                upload = slots.upload(source)
                if number != 2:  # one upload is given back unread
                    reads.append((self._late_read(backend, upload.wait()), source.float()))
                _give_back(upload)
                _in_a_thread(upload.drained)  # it may be asked twice
                source.fill_(0xFF)
            for result, expected in reads:
                assert torch.equal(result.cpu(), expected), (
                    "what was waited for changed with its source"
                )

    def test_memory_that_is_given_becomes_a_host_buffer(self) -> None:
        """`host_buffer` takes memory as it is, and copies go from and to it."""
        with closing(self.backend()) as backend:
            for size in (SLOT, PAGE + 17):
                memory = anonymous(size)
                memory.fill_(7)
                buffer = backend.host_buffer(size, memory)
                assert buffer.dtype == torch.uint8 and tuple(buffer.shape) == (size,)
                assert buffer.data_ptr() == memory.data_ptr(), (
                    "the memory given is not what is used"
                )
                buffer[0] = 9
                assert memory[:2].tolist() == [9, 7], (
                    "what is written to the buffer is not in the memory"
                )
                upload = backend.device_slots(size, 1).upload(buffer)
                assert torch.equal(read(upload.wait()), memory)
                _give_back(upload)
                backend.download(
                    torch.full((size,), 3, dtype=torch.uint8, device=backend.device), buffer
                ).landed()
                assert bool((memory == 3).all()), (
                    "what is downloaded to the buffer is not in the memory"
                )

    def test_a_source_may_be_dropped_before_it_is_copied(self) -> None:
        """The caller of an upload or download need not keep the memory; nothing else is put
        there meanwhile.
        """
        with closing(self.backend()) as backend:
            rings = [backend.device_slots(SLOT, 1) for _ in range(6)]
            uploads = []
            for number, ring in enumerate(rings):
                source = source_of(backend, number)
                uploads.append((ring.upload(source), source.tolist()))
                del source
                source_of(backend, 99)  # where the source was, if it is gone
            for upload, expected in uploads:
                assert upload.wait().tolist() == expected, (
                    "a source that was dropped was not copied whole"
                )
                upload.release()

    def test_a_download_sees_the_compute_queued_before_it(self) -> None:
        """Any dtype, any order of the dimensions; `landed` may be called from any thread, and
        again.
        """
        with closing(self.backend()) as backend:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1)):
                    shape = (2, 8, 16)
                    expected = torch.arange(256).reshape(shape).permute(order).to(dtype)
                    source = self._late(backend, expected)
                    target = _host_like(backend, expected)
                    assert target.stride() == source.stride()
                    download = backend.download(source, target)
                    _in_a_thread(download.landed)
                    assert torch.equal(target, expected), f"{dtype}, dimensions {order}"
                    download.release()
                    download.landed()

    def test_a_released_source_may_be_overwritten(self) -> None:
        """Work queued after `release` comes after the copy, without a wait for it."""
        with closing(self.backend()) as backend:
            begun = []
            for number in range(4):
                expected = torch.full((64, 32), float(number))
                source = self._late(backend, expected)
                target = _host_like(backend, expected)
                download = backend.download(source, target)
                download.release()
                source.fill_(-1)
                begun.append((download, target, expected))
            for download, target, expected in begun:
                download.landed()
                assert torch.equal(target, expected), (
                    "a source was overwritten before it was copied"
                )

    def test_what_is_uploaded_after_a_download_is_what_it_brings(self) -> None:
        """There and back, without a wait in between."""
        with closing(self.backend()) as backend:
            slots = backend.device_slots(SLOT, 1)
            buffer = backend.host_buffer(SLOT)
            buffer.fill_(0xFF)
            for number in range(4):
                expected = torch.full((SLOT // 4,), float(number))
                download = backend.download(
                    self._late(backend, expected), buffer.view(torch.float32)
                )
                upload = slots.upload(buffer)
                uploaded = upload.wait().view(torch.float32).clone()
                upload.release()
                download.release()
                assert torch.equal(uploaded.cpu(), expected), (
                    f"download {number} was not waited for"
                )

    def _late_read(self, backend: Backend, slot: Tensor) -> Tensor:
        """Queue work, and behind it a read of the slot."""
        return slot.float() * self._late_one(backend)

    def _late(self, backend: Backend, values: Tensor) -> Tensor:
        """Queue work, and behind it what makes a tensor of these values and strides on the
        device.
        """
        out = torch.empty_strided(
            values.shape, values.stride(), dtype=values.dtype, device=backend.device
        )
        return torch.mul(
            values.to(backend.device), self._late_one(backend).to(values.dtype), out=out
        )

    def _late_one(self, backend: Backend) -> Tensor:
        self.keep_busy()
        ones = torch.ones(512, 512, device=backend.device)
        for _ in range(self.busy_matmuls):
            ones = ones @ ones / 512  # ones still
        return ones[0, 0]


def source_of(backend: Backend, number: int, size: int = SLOT) -> Tensor:
    """Fill a host buffer with bytes that no other number gives; read as floats they are numbers,
    not NaN.
    """
    buffer = backend.host_buffer(size)
    generator = torch.Generator().manual_seed(number)
    buffer.copy_(torch.randint(1, 64, (size,), dtype=torch.uint8, generator=generator))
    return buffer


def read(slot: Tensor) -> Tensor:
    """Return what is in a slot now."""
    return slot.clone().cpu()


def _give_back(upload: Upload) -> None:
    upload.release()
    _in_a_thread(upload.drained)


def _in_a_thread(call: Callable[[], None]) -> None:
    """Call from another thread, as the core's readers do."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def _host_like(backend: Backend, like: Tensor) -> Tensor:
    """Return a tensor in a host buffer of the shape, dtype and strides of another, filled with
    other numbers.
    """
    buffer = backend.host_buffer(like.nbytes)
    buffer.fill_(0x55)
    return buffer.view(like.dtype).as_strided(like.shape, like.stride())
