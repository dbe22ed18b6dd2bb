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
    """Return the trainer that has most of a run's keys for its own.

    Args:
        run: the run.
        where: the file or command line, for the error.

    Raises:
        ConfigError: no trainer's own keys are among them, or those of two alike.
    """
    peers = [peer_named(name) for name in PEERS]
    counts = [peer.recognises(run) for peer in peers]
    best = [peer for peer, count in zip(peers, counts, strict=True) if count == max(counts)]
    if max(counts) == 0 or len(best) > 1:
        raise ConfigError(_unclear(best if max(counts) else []), where=where, how=_HOW)
    return best[0]


_HOW = f"say it with --from {', '.join(PEERS)}"


def _unclear(peers: Sequence[Peer]) -> str:
    if not peers:
        return "none of the keys is one that only TRL, axolotl, LLaMA-Factory or torchtune has"
    return f"the keys may be those of {' or '.join(peer.name for peer in peers)}"
