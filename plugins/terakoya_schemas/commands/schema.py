"""`terakoya parameters schema`: the JSON Schema of a settings file."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    name: Annotated[
        str, typer.Argument(help="parameters, pipeline, cleaning, tokenizer, or a launcher such as slurm.")
    ] = "parameters",
) -> None:
    """Print the JSON Schema of a settings file, with which an editor completes and explains keys.

    Every installed component is one choice of its key, by its `type`. A file names its schema in its key "$schema".
    """
    from terakoya.plugins import registry
    from terakoya_schemas.files import schema_of

    typer.echo(json.dumps(schema_of(name, registry()), indent=2, ensure_ascii=False))
