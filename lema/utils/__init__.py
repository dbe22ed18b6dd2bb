"""The place earlier versions kept `prepare_monolithic_safetensors` in; kept so that old imports still work."""
