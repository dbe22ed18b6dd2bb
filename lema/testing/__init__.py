"""The contract of a device backend, published as tests that anyone who writes one can run.

    from lema.testing import BackendContract

    class TestMyBackend(BackendContract):
        def backend(self):
            return MyBackend("mine")

        def model_config(self):
            return AutoConfig.for_model(MODEL_TYPE, num_hidden_layers=6, hidden_size=32, ...)

pytest collects the subclass. Each test opens the backend again and closes it, so a backend that
cannot be opened twice in a process breaks the contract too.
"""

from lema.testing.contract import BackendContract

__all__ = ["BackendContract"]
