"""PEFT's tests are run by `tox -e peers-peft`; there is nothing to collect here."""

collect_ignore_glob = ["*.py"]
