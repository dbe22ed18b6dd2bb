"""Errors of packages that do not fit each other, in the words of who installs them.

torchvision is made for one release of torch, and for one build of it, and registers its operators
as it is imported. transformers imports it wherever it is installed, though LEMA does not need it,
and reports that something of its own could not be imported. What torchvision said is among the
causes.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from lema.errors import ConfigError

__all__ = ["misfit"]

NO_OPERATORS = ("operator torchvision::", "partially initialized module 'torchvision'")
BUILDS = "https://download.pytorch.org/whl"  # torch's own index has a folder for each build


def misfit(error: BaseException) -> ConfigError | None:
    """Return the error of two packages that do not fit each other, if `error` came of that."""
    if not any(sign in str(cause) for cause in _causes(error) for sign in NO_OPERATORS):
        return None
    try:
        package = distribution("torchvision")
        torch = version("torch")
    except PackageNotFoundError:  # of a directory that was put on the path
        return None
    requirements = package.requires or ()
    needs = next((entry for entry in requirements if entry.startswith("torch==")), "")
    what = (
        f"torchvision {package.version}{f', which needs {needs},' if needs else ''} does not "
        f"fit torch {torch}"
    )
    release, _, build = torch.partition("+")
    again = (
        f'pip install "torch=={release}" '
        f"torchvision{f' --index-url {BUILDS}/{build}' if build else ''}"
    )
    how = (
        f"pip uninstall torchvision, which LEMA does not need; to have one that fits, then {again}"
    )
    return ConfigError(what, where=str(package.locate_file("torchvision")), how=how)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came of."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        yield at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
