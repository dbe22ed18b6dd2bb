"""Tells of which trainer a file or a command line is."""

from collections.abc import Sequence
from importlib import import_module

from lema.errors import ConfigError
from lema_tools.importing.translation import ForeignRun, Peer

__all__ = ["PEERS", "peer_named", "peer_of", "refuse_settings"]

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
    keys = frozenset(run.values)
    for candidates in (
        [peer for peer in peers if peer.recognises(run)],
        _most(peers, keys),
        [peer for peer in peers if keys <= peer.keys()],
    ):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            names = " or ".join(peer.name for peer in candidates)
            raise ConfigError(f"the keys may be those of {names}", where=where, how=_HOW)
    what = "none of the keys is one that only TRL, axolotl, LLaMA-Factory or torchtune has"
    raise ConfigError(what, where=where, how=_HOW)


def refuse_settings(run: ForeignRun, where: str) -> None:
    """Refuse a file of LEMA itself: it has settings that no other trainer has, and no other keys.

    Args:
        run: the run.
        where: the file or command line, for the error.

    Raises:
        ConfigError: the file is LEMA's.
    """
    from lema.config import LemaConfig
    from lema.train.phases.file import PHASES, SHARED, STAGES

    settings = {*LemaConfig.defaults(), PHASES, *SHARED, *STAGES}
    theirs = frozenset().union(*(peer_named(name).keys() for name in PEERS))
    keys = frozenset(run.values)
    if (keys & settings) - theirs and not (keys & theirs) - settings:
        what = "this file has settings of LEMA, and nothing to translate"
        raise ConfigError(what, where=where, how=f"run it: lema plan {where}; lema train {where}")


def _most(peers: Sequence[Peer], keys: frozenset[str]) -> list[Peer]:
    """Return the trainers that have the most keys of a run for themselves; none: nobody has one."""
    counts = [
        len(
            keys
            & peer.keys()
            - frozenset().union(*(other.keys() for other in peers if other is not peer))
        )
        for peer in peers
    ]
    best = max(counts)
    return [peer for peer, count in zip(peers, counts, strict=True) if best and count == best]


_HOW = f"say it with --from {', '.join(PEERS)}"
