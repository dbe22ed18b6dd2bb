"""The reader: the right bytes by whatever way the file system allows, every failure carried to
whoever waits.
"""

import errno
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from stream_fakes import Stored, same, write_layers

from lema.errors import DiskError, ReadError
from lema.storage.header import TensorRecord
from lema.stream.placement import PAGE, LayerBytes, lay_out_tensors, views
from lema.stream.reader import LayerReader
from lema_cpu import CpuBackend

RUBBISH = 0xC3


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return write_layers(tmp_path)


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def reader(request: pytest.FixtureRequest) -> LayerReader:
    reader = LayerReader(threads=3, direct=request.param)
    request.addfinalizer(reader.close)
    return reader


def buffer_for(layer: LayerBytes) -> torch.Tensor:
    return CpuBackend().host_buffer(layer.nbytes).fill_(RUBBISH)


def descriptors_of(file: Path) -> int:
    """How many descriptors of this process are open on `file`."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += link.readlink() == file
        except FileNotFoundError:
            continue  # the descriptor that lists the directory
    return found


def test_layers_under_way_together_do_not_mix(stored: Stored, reader: LayerReader) -> None:
    buffers = [buffer_for(layer) for layer in stored.layers]
    tickets = [
        reader.submit(layer, buffer) for layer, buffer in zip(stored.layers, buffers, strict=True)
    ]
    for ticket, layer, buffer, expected in zip(
        tickets, stored.layers, buffers, stored.contents, strict=True
    ):
        ticket.wait()
        assert ticket.done() and ticket.failed() is None
        assert same(views(buffer, layer), expected)
    assert reader.bytes_read == sum(layer.read_bytes for layer in stored.layers)


def test_a_buffer_that_direct_reads_refuse_is_filled_all_the_same(stored: Stored) -> None:
    """An odd address is refused as a file system without direct reads refuses: with EINVAL."""
    reader = LayerReader(direct=True)
    layer = stored.layers[2]
    for _ in range(2):
        buffer = CpuBackend().host_buffer(layer.nbytes + PAGE)[4 : layer.nbytes + 4]
        assert buffer.data_ptr() % PAGE == 4
        reader.submit(layer, buffer).wait()
        assert same(views(buffer, layer), stored.contents[2])
    aligned = buffer_for(layer)
    reader.submit(layer, aligned).wait()
    assert same(views(aligned, layer), stored.contents[2])
    reader.close()
    assert descriptors_of(stored.file) == 0


def test_closing_closes_every_file(stored: Stored, reader: LayerReader) -> None:
    assert descriptors_of(stored.file) == 0
    reader.submit(stored.layers[0], buffer_for(stored.layers[0])).wait()
    opened = descriptors_of(stored.file)
    reader.submit(stored.layers[1], buffer_for(stored.layers[1])).wait()
    assert 1 <= opened == descriptors_of(stored.file)
    reader.close()
    reader.close()
    assert descriptors_of(stored.file) == 0


@pytest.mark.parametrize("kept", [0, 1, PAGE - 1, PAGE, PAGE + 100])
def test_a_file_cut_short_after_it_was_opened_is_named(
    tmp_path: Path, reader: LayerReader, kept: int
) -> None:
    stored = write_layers(tmp_path, 4)
    reader.submit(stored.layers[0], buffer_for(stored.layers[0])).wait()
    end = stored.layers[2].runs[0].offset
    os.truncate(stored.file, min(kept, end))
    ticket = reader.submit(stored.layers[2], buffer_for(stored.layers[2]))
    with pytest.raises(ReadError) as caught:
        ticket.wait()
    assert caught.value is ticket.failed() and ticket.done()
    assert isinstance(caught.value, DiskError)
    assert caught.value.where == str(stored.file)
    assert "bytes early" in caught.value.what and caught.value.how
    assert isinstance(caught.value.__cause__, OSError)


def test_a_cast_from_a_file_cut_short_is_named_too(tmp_path: Path, reader: LayerReader) -> None:
    file = tmp_path / "cut.bin"
    file.write_bytes(bytes(100))
    layer = lay_out_tensors({"w": (TensorRecord("w", file, 4, 400, "F32", (100,)), torch.bfloat16)})
    assert layer.casts
    with pytest.raises(ReadError, match="304 bytes early") as caught:
        reader.submit(layer, buffer_for(layer)).wait()
    assert caught.value.where == str(file)


def test_a_missing_file_is_named_and_the_reader_goes_on(
    stored: Stored, reader: LayerReader, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.bin"
    layer = lay_out_tensors({"w": (TensorRecord("w", gone, 0, 400, "F32", (100,)), torch.float32)})
    with pytest.raises(ReadError, match="No such file") as caught:
        reader.submit(layer, buffer_for(layer)).wait()
    assert caught.value.where == str(gone)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    buffer = buffer_for(stored.layers[1])
    reader.submit(stored.layers[1], buffer).wait()
    assert same(views(buffer, stored.layers[1]), stored.contents[1])


def test_a_failing_device_is_named(tmp_path: Path, reader: LayerReader) -> None:
    """A directory opens, but does not read."""
    layer = lay_out_tensors(
        {"w": (TensorRecord("w", tmp_path, 0, 400, "F32", (100,)), torch.float32)}
    )
    with pytest.raises(ReadError) as caught:
        reader.submit(layer, buffer_for(layer)).wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EISDIR
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("threads", [1, 3])
def test_no_byte_is_read_before_the_buffer_may_be_overwritten(stored: Stored, threads: int) -> None:
    reader = LayerReader(threads=threads)
    free = threading.Event()
    buffer = buffer_for(stored.layers[0])
    ticket = reader.submit(stored.layers[0], buffer, free.wait)
    if threads > 1:  # the reader has gone on to what came after
        other = buffer_for(stored.layers[1])
        late = reader.submit(stored.layers[1], other)
        late.wait()
        assert same(views(other, stored.layers[1]), stored.contents[1])
    assert not ticket.done() and ticket.failed() is None
    assert bool((buffer == RUBBISH).all())
    free.set()
    ticket.wait()
    assert same(views(buffer, stored.layers[0]), stored.contents[0])
    reader.close()


def test_a_buffer_that_never_becomes_free_is_left_alone(
    stored: Stored, reader: LayerReader
) -> None:
    def refuse() -> None:
        raise RuntimeError("the device is gone")

    buffer = buffer_for(stored.layers[0])
    ticket = reader.submit(stored.layers[0], buffer, refuse)
    with pytest.raises(RuntimeError, match="the device is gone"):
        ticket.wait()
    ticket.cancel()
    assert str(ticket.failed()) == "the device is gone"
    assert bool((buffer == RUBBISH).all())


def test_a_settled_ticket_reads_no_more(stored: Stored) -> None:
    reader = LayerReader(threads=1)
    free = threading.Event()
    first = buffer_for(stored.layers[0])
    second = buffer_for(stored.layers[1])
    under_way = reader.submit(stored.layers[0], first, free.wait)
    waiting = reader.submit(stored.layers[1], second, lambda: None)  # behind the other's gate
    waiting.cancel()
    assert waiting.failed() is None
    free.set()
    under_way.wait()
    reader.close()
    assert same(views(first, stored.layers[0]), stored.contents[0])
    assert bool((second == RUBBISH).all())


def test_layers_whose_buffers_are_in_use_hold_up_no_other(stored: Stored) -> None:
    reader = LayerReader(threads=2)
    free = threading.Event()
    buffers = [buffer_for(layer) for layer in stored.layers]
    in_use = [reader.submit(stored.layers[index], buffers[index], free.wait) for index in range(4)]
    for index in (4, 5):
        reader.submit(stored.layers[index], buffers[index]).wait()
        assert same(views(buffers[index], stored.layers[index]), stored.contents[index])
    assert all(
        not ticket.done() and bool((buffer == RUBBISH).all())
        for ticket, buffer in zip(in_use, buffers[:4], strict=True)
    )
    free.set()
    for index, ticket in enumerate(in_use):
        ticket.wait()
        assert same(views(buffers[index], stored.layers[index]), stored.contents[index])
    reader.close()


def test_the_threads_of_a_reader_that_nobody_closed_end_with_it(stored: Stored) -> None:
    reader = LayerReader(threads=2)
    reader.submit(stored.layers[0], buffer_for(stored.layers[0])).wait()
    threads = list(reader._workers._parts._threads)
    assert threads
    del reader
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_settling_waits_for_the_read_that_has_begun(stored: Stored, reader: LayerReader) -> None:
    begun = threading.Event()
    free = threading.Event()

    def before() -> None:
        begun.set()
        free.wait()

    buffer = buffer_for(stored.layers[3])
    ticket = reader.submit(stored.layers[3], buffer, before)
    begun.wait()
    settling = threading.Thread(target=ticket.cancel)
    settling.start()
    assert settling.is_alive() and not ticket.done()
    free.set()
    settling.join()
    assert ticket.done()
    after = buffer.clone()
    reader.close()
    assert torch.equal(buffer, after)
