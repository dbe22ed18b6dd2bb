"""vLLM is installed in an environment of its own (`tox -e serving`); elsewhere there is nothing to
collect here.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]
