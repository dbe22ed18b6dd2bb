"""`lema models`: which types of models stream, and whether one that you have does."""

from typing import Annotated

import typer

from lema.cli.arguments import Revision, Trust
from lema.cli.libraries import import_libraries

__all__ = ["models"]


def models(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="TYPE|MODEL", help="Types, or directories and cached hub ids."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/models.md.")
    ] = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """List the types of models: which types stream, which adapters train in them, and why some
    do not stream.
    """
    import_libraries(context, trusted=trust_remote_code)
    from rich.console import Console

    from lema_tools.survey.table import json_text, markdown, show_models, survey_all

    rows = survey_all(names or [], revision=revision, trust_remote_code=trust_remote_code)
    if as_json or as_markdown:
        typer.echo((json_text if as_json else markdown)(rows), nl=as_json)
    else:
        show_models(rows, Console(highlight=False))
