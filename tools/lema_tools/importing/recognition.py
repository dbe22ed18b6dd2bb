"""Tells of which trainer a file or a command line is."""

from collections.abc import Sequence
from importlib import import_module

from lema.errors import ConfigError
from lema_tools.importing.translation import ForeignRun, Peer

__all__ = ["PEERS", "peer_named", "peer_of"]

PEERS = ("trl", "axolotl", "llamafactory", "torchtune")
"""The folders of this package, each with a `PEER`."""


def peer_named(name: str) -> Peer:
    """Return a trainer by the name of its folder. `ConfigError`: there is none of that name."""
    if name not in PEERS:
        raise ConfigError(
            f"LEMA has no importer for {name!r}", where="--from", how=f"use {', '.join(PEERS)}"
        )
    peer: Peer = import_module(f"lema_tools.importing.{name}").PEER
    return peer


def peer_of(run: ForeignRun, where: str) -> Peer:
    """Return the trainer of a run: whose words or form it has, or else who has most keys that no
    other has, or else who alone has all of its keys.

    Args:
        run: the run.
        where: the file or command line, for the error.

    Raises:
        ConfigError: it may be of none, or of several.
    """
    peers = [peer_named(name) for name in PEERS]
    given = frozenset(run.values)
    for candidates in (
        [peer for peer in peers if peer.recognises(run)],
        _most(peers, given),
        [peer for peer in peers if given <= peer.keys()],
    ):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = " or ".join(peer.name for peer in candidates)
            raise ConfigError(f"the keys may be those of {names}", where=where, how=_HOW)
    what = "none of the keys is one that only TRL, axolotl, LLaMA-Factory or torchtune has"
    raise ConfigError(what, where=where, how=_HOW)


def _most(peers: Sequence[Peer], given: frozenset[str]) -> list[Peer]:
    """Return the trainers that have the most keys of a run for themselves; none: nobody has one."""
    counts = [
        len(
            given
            & peer.keys()
            - frozenset().union(*(other.keys() for other in peers if other is not peer))
        )
        for peer in peers
    ]
    best = max(counts)
    return [peer for peer, count in zip(peers, counts, strict=True) if best and count == best]


_HOW = f"say it with --from {', '.join(PEERS)}"
