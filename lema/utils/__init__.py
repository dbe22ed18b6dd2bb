"""The old place of `prepare_monolithic_safetensors`, kept so that documents which import it from
here stay true.
"""
