"""A shuffled order of any number of rows in which each place is computed alone, in constant time
and memory.

The order is a Feistel network over the bits of a place, which is a bijection whatever its round
function is. Places beyond the last are sent through again until they fall inside ("cycle walking"),
less than twice on average. Black and Rogaway, "Ciphers with arbitrary finite domains" (2002),
describe both. It is made for shuffling, not for secrets.
"""

import json
from functools import lru_cache
from hashlib import blake2b

__all__ = ["Permutation", "permutation", "shuffled_row"]

ROUNDS = 12
# a network of fewer than six bits needs more until all its orders are equally likely
ROUNDS_OF_FEW = 24
MASK = 2**64 - 1


class Permutation:
    """A permutation of `range(count)`, called with a place and returning the number there. The
    order depends on `count`, 1 or more, and the numbers and words of the key, and on nothing else.
    """

    def __init__(self, count: int, *key: int | str) -> None:
        if count < 1:
            raise ValueError(f"a permutation cannot have {count} things")
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self._low = bits // 2
        self._low_mask = (1 << self._low) - 1
        self._high_mask = (1 << (bits - self._low)) - 1
        text = json.dumps(key).encode()
        rounds = range(ROUNDS_OF_FEW if bits < 6 else ROUNDS)
        digests = [blake2b(text, digest_size=8, salt=bytes([number])).digest() for number in rounds]
        self._keys = [int.from_bytes(digest, "little") for digest in digests]

    def __call__(self, index: int) -> int:
        """Return what stands at `index`; IndexError: there is no such place."""
        if not 0 <= index < self.count:
            raise IndexError(f"place {index} of {self.count}")
        index = self._network(index)
        while index >= self.count:
            index = self._network(index)
        return index

    def _network(self, index: int) -> int:
        high = index >> self._low
        low = index & self._low_mask
        keys = iter(self._keys)
        for first, second in zip(keys, keys, strict=True):
            high ^= _mixed(low + first) & self._high_mask
            low ^= _mixed(high + second) & self._low_mask
        return high << self._low | low


def _mixed(value: int) -> int:
    """64 bits that each depend on all of `value`: the finalizer of SplitMix64 (Steele, Lea and
    Flood, 2014).
    """
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


permutation = lru_cache(maxsize=256)(Permutation)
"""A `Permutation` from a cache of the latest ones: successive rows belong to few orders."""


def shuffled_row(count: int, index: int, *key: int | str) -> tuple[int, int]:
    """Return epoch and row of the `index`-th row drawn from `count` rows, with a different order in
    each epoch. Every row comes once in an epoch: in `count` draws from a multiple of `count` on."""
    epoch, position = divmod(index, count)
    return epoch, permutation(count, *key, epoch)(position)
