"""nbclient has an environment of its own (`tox -e notebooks`); elsewhere there is nothing to
collect here.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("nbclient") else ["*.py"]
