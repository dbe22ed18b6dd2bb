"""A read that fails stops training at the next lease, with its cause; nothing is lost, and the
stream works again.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from stream_fakes import RecordingReader, SteppedReader, Stored, same, write_layers
from torch import Tensor

from lema.backend import DeviceSlots, MemoryStats, SlotLayout, Upload
from lema.errors import ReadError
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.schedule import forward_order
from lema_cpu import CpuBackend

NUM_LAYERS = 6
RESIDENT = 5


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return write_layers(tmp_path, NUM_LAYERS)


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def reader(request: pytest.FixtureRequest) -> RecordingReader:
    return RecordingReader(direct=request.param)


@pytest.fixture
def stream(stored: Stored, reader: RecordingReader) -> Iterator[LayerStream]:
    """The file is open: one lease has been, and the layer that stays has been read."""
    stream = LayerStream(
        stored.layers,
        CpuBackend(poison=True),
        prefetch_depth=2,
        residents={RESIDENT},
        reader=reader,
    )
    with stream.lease(0):
        stream.load_residents()
    yield stream
    stream.close()


class Damage:
    """The file, cut short in the middle of a layer; `mend` puts the bytes back."""

    def __init__(self, stored: Stored, layer: int) -> None:
        self.file, self.whole = stored.file, stored.file.read_bytes()
        run = stored.layers[layer].runs[0]
        with self.file.open("r+b") as handle:
            handle.truncate(run.offset + run.nbytes // 2)

    def mend(self) -> None:
        with self.file.open("r+b") as handle:
            handle.write(self.whole)


def assert_works(stream: LayerStream, stored: Stored) -> None:
    """Every layer comes, and as many are held at once as there are slots."""
    order = forward_order(NUM_LAYERS) * 2
    stream.announce(order)
    for layer in order:
        with stream.lease(layer) as lease:
            assert same(lease.weights, stored.contents[layer])
    with ExitStack() as stack:
        held = [stack.enter_context(stream.lease(layer)) for layer in range(stream.num_slots)]
        assert all(same(lease.weights, stored.contents[lease.layer]) for lease in held)


@pytest.mark.parametrize(
    "asked", [0, 1, 4, RESIDENT], ids=["its turn", "another", "out of order", "resident"]
)
def test_a_failed_prefetch_surfaces_at_the_next_lease_whichever_it_is(
    stored: Stored, stream: LayerStream, reader: RecordingReader, asked: int
) -> None:
    damage = Damage(stored, 2)
    stream.announce(forward_order(NUM_LAYERS))
    reader.settle_all()
    with pytest.raises(ReadError) as caught, stream.lease(asked):
        pytest.fail("a lease was given though a read had failed")
    assert caught.value.where == str(stored.file)
    assert "bytes early" in caught.value.what
    assert isinstance(caught.value.__cause__, OSError)
    assert stream.announced == 0
    damage.mend()
    assert_works(stream, stored)


def test_a_lease_that_is_held_is_not_disturbed(
    stored: Stored, stream: LayerStream, reader: RecordingReader
) -> None:
    damage = Damage(stored, 2)
    with stream.lease(0) as held:
        stream.announce([1, 2, 3])
        reader.settle_all()
        with stream.lease(0) as again:  # what is on lease needs no read
            assert again is held
        for _ in range(2):
            with pytest.raises(ReadError), stream.lease(2):
                pytest.fail("a lease was given though its read had failed")
        assert same(held.weights, stored.contents[0])
    damage.mend()
    assert_works(stream, stored)


def test_a_lease_that_waits_for_the_failing_read_raises_it(
    stored: Stored, stream: LayerStream
) -> None:
    """Nobody announced the layer, so the training thread itself is waiting when the read fails."""
    damage = Damage(stored, 3)
    with pytest.raises(ReadError, match="bytes early"), stream.lease(3):
        pytest.fail("a lease was given though its read had failed")
    with stream.lease(1) as lease:  # before the cut
        assert same(lease.weights, stored.contents[1])
    damage.mend()
    assert_works(stream, stored)


def test_a_failure_in_the_training_thread_forgets_what_was_announced_too(
    stored: Stored, tmp_path: Path
) -> None:
    layers = list(stored.layers)
    layers[1] = without_a_file(layers[1], tmp_path / "gone.bin")
    reader = SteppedReader(0)
    reader.chance.random = lambda: 1.0  # type: ignore[method-assign] # reads go on only when they are waited for,
    reader.chance.choice = lambda pending: pending[0]  # type: ignore[method-assign] # and in their order
    stream = LayerStream(layers, CpuBackend(), prefetch_depth=2, reader=reader)
    stream.announce(forward_order(NUM_LAYERS))
    with pytest.raises(ReadError, match="No such file"):
        for layer in range(2):
            with stream.lease(layer):
                pass
    assert stream.announced == 0 and not reader.pending
    stream.close()


def test_failing_again_and_again_uses_up_no_buffer(stored: Stored, stream: LayerStream) -> None:
    damage = Damage(stored, 1)
    for _ in range(3 * stream.num_slots):
        stream.announce(forward_order(NUM_LAYERS))
        with pytest.raises(ReadError):
            for layer in range(NUM_LAYERS):
                with stream.lease(layer):
                    pass
        assert stream.announced == 0
    damage.mend()
    assert_works(stream, stored)


def without_a_file(layer: LayerBytes, path: Path) -> LayerBytes:
    return replace(layer, runs=tuple(replace(run, file=path) for run in layer.runs))


class OwnMemory(CpuBackend):
    """A device that says that its memory is not the host's."""

    def memory(self) -> MemoryStats:
        return replace(super().memory(), shared=False)


@pytest.mark.parametrize("option", ["residents", "host_cached"])
def test_what_is_read_at_the_start_fails_at_the_start(
    stored: Stored, tmp_path: Path, option: str
) -> None:
    layers = list(stored.layers)
    layers[3] = without_a_file(layers[3], tmp_path / "gone.bin")
    options = {option: {3}}
    with pytest.raises(ReadError, match="No such file") as caught:
        LayerStream(layers, OwnMemory(), **options)  # type: ignore[arg-type]
    assert caught.value.where == str(tmp_path / "gone.bin")


def test_a_layer_that_stays_and_cannot_be_read_fails_when_it_is_leased_and_others_do_not(
    stored: Stored, tmp_path: Path
) -> None:
    layers = list(stored.layers)
    layers[3] = without_a_file(layers[3], tmp_path / "gone.bin")
    stream = LayerStream(layers, CpuBackend(), residents=range(NUM_LAYERS))
    for _ in range(2):
        for layer in set(range(NUM_LAYERS)) - {3}:
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[layer])
        with pytest.raises(ReadError, match="No such file") as caught, stream.lease(3):
            pass
        assert caught.value.where == str(tmp_path / "gone.bin")
    with pytest.raises(ReadError):
        stream.load_residents()
    stream.close()


def test_an_error_of_the_caller_gives_the_slot_back(stored: Stored, stream: LayerStream) -> None:
    stream.announce(forward_order(NUM_LAYERS))
    for _ in range(2 * stream.num_slots):
        with pytest.raises(KeyboardInterrupt), stream.lease(0), stream.lease(1):
            raise KeyboardInterrupt
    assert_works(stream, stored)


class LostDevice(CpuBackend):
    """A device that never says when it is done with a source."""

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return LostSlots(super().device_slots(nbytes, count))


class LostSlots:
    def __init__(self, slots: DeviceSlots) -> None:
        self.slots = slots

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        return LostUpload(self.slots.upload(source, layout))


class LostUpload:
    def __init__(self, upload: Upload) -> None:
        self.wait = upload.wait
        self.release = upload.release

    def drained(self) -> None:
        raise RuntimeError("the device is gone")


def test_a_device_that_cannot_say_when_it_is_done_stops_training(stored: Stored) -> None:
    """`drained` fails in a reader thread; nothing is read over what may still be in use."""

    stream = LayerStream(stored.layers, LostDevice(poison=True), prefetch_depth=1)
    order = forward_order(NUM_LAYERS)
    stream.announce(order)
    with pytest.raises(RuntimeError, match="the device is gone"):
        for layer in order:
            with stream.lease(layer):
                pass
    stream.close()
