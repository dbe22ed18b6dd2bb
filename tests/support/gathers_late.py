"""Run by `torchrun`: replicas gather from each other on devices whose copies come late. Says
`gathered` when right.
"""

import torch
from latedevice import LateDevice

PART = 3 * 4096 + 8
LAYERS = 7


def part(layer: int, rank: int) -> torch.Tensor:
    return torch.full((PART,), 1 + 16 * layer + rank, dtype=torch.uint8)


def main() -> None:
    backend = LateDevice(seed=2)
    replicas = backend.replicas
    rank = backend.replicas.rank
    assert replicas.size == replicas.local_size == 2 and replicas.local_rank == rank
    slots = backend.device_slots(PART, 2)
    wholes = [torch.zeros(2 * PART, dtype=torch.uint8) for _ in range(2)]
    shared = backend.host_buffer(LAYERS * PART, replicas.shared_memory(LAYERS * PART))
    if rank == 0:
        for layer in range(LAYERS):
            shared[layer * PART : (layer + 1) * PART] = part(layer, 0)
    replicas.exchange(None)
    ahead = []
    for layer in range(LAYERS):
        source = shared[layer * PART : (layer + 1) * PART] if rank == 0 else part(layer, 1)
        ahead.append(replicas.gather(slots.upload(source), wholes[layer % 2]))
        if layer:
            ahead[layer - 1].wait()
            expected = torch.cat([part(layer - 1, 0), part(layer - 1, 1)])
            assert torch.equal(wholes[(layer - 1) % 2], expected), f"layer {layer - 1}"
    ahead[-1].wait()
    numbers = torch.arange(4.0) * (rank + 1)
    replicas.sum(numbers)
    assert numbers.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert replicas.exchange(rank) == [0, 1]
    backend.synchronize()
    backend.close()
    print("gathered", flush=True)  # noqa: T201 - what the test looks for


if __name__ == "__main__":
    main()
