"""`from lema.utils.model_utils import prepare_monolithic_safetensors`, as users of earlier
versions write it.
"""

from lema.convert import prepare_monolithic_safetensors

__all__ = ["prepare_monolithic_safetensors"]
