"""Runs of axolotl: the YAML files of `axolotl train`."""

from lema_tools.importing.axolotl.peer import PEER

__all__ = ["PEER"]
