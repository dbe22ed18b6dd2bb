"""Text from a streamed model: `transformers`' own `generate`, with every layer leased when it is
called.

docs/internals/engine.md describes the folder.
"""

from lema.engine.generation.forward import KeyValues, leased_forwards, streaming_forward
from lema.engine.generation.prefill import Prefill
from lema.engine.generation.stopping import Finish, Generated
from lema.engine.generation.tokens import checked, complete, encoded

__all__ = [
    "Finish",
    "Generated",
    "KeyValues",
    "Prefill",
    "checked",
    "complete",
    "encoded",
    "leased_forwards",
    "streaming_forward",
]
