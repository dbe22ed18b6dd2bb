"""A backend in fifty lines: a device with slots of its own, which happens to be made of host
memory.
"""

import mmap
import os
import resource
from contextlib import nullcontext

import torch

from lema.backend import Alone, Downloaded, MemoryStats, SingleProcess, SlotLayout, Span


class ToySlots:
    def __init__(self, nbytes, count):
        self.slots = torch.empty(count, nbytes, dtype=torch.uint8)
        self.free = set(range(count))

    def upload(self, source, layout=None):
        slot = self.free.pop()
        if layout is None:
            layout = SlotLayout(len(source), (Span(0, len(source), 0),))
        for span in layout.spans:
            piece = source[span.start : span.start + span.nbytes]
            self.slots[slot, span.slot : span.slot + span.nbytes] = piece
        return ToyUpload(self, slot, layout.nbytes)


class ToyUpload:
    def __init__(self, ring, slot, nbytes):
        self.wait = lambda: (ring.free.discard(slot), ring.slots[slot, :nbytes])[1]
        self.release = lambda: ring.free.add(slot)
        self.drained = lambda: None  # the copy ended before `upload` did


class ToyBackend:
    name = "toy"
    device = torch.device("cpu")
    parallel = SingleProcess()
    replicas = Alone()
    rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    device_slots = staticmethod(ToySlots)
    end_step = synchronize = close = staticmethod(lambda: None)

    def __init__(self, device, options):
        self.opened_as = device

    def host_buffer(self, nbytes, memory=None):
        return (
            memory
            if memory is not None
            else torch.frombuffer(mmap.mmap(-1, nbytes or 1), dtype=torch.uint8)[:nbytes]
        )

    def download(self, source, target):
        target.copy_(source)
        return Downloaded()

    def autocast(self, dtype):
        return nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)

    def memory(self):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryStats(used, used, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
