"""The command line: every verb, the options that all of them take, and how errors are shown."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from terakoya import __version__
from terakoya.errors import UserError

DEBUG_VARIABLE = "TERAKOYA_DEBUG"


class InOrder(TyperGroup):
    """Lists the verbs in the order of use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs, as `VERBS` has them."""
        return [verb for verb in VERBS if verb in self.commands]


app = typer.Typer(
    name="terakoya",
    cls=InOrder,
    context_settings={"max_content_width": 110},
    help="Trains language models from raw text: tokenizer, token store, pre-training, export.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

VERBS = {
    "demo": "demo",
    "run": "run",
    "tokenizer": "tokenizer",
    "prepare": "prepare",
    "store": "store",
    "train": "train",
    "export": "export",
    "try": "try_model",
    "plugins": "plugins",
    "parameters": "parameters",
    "doctor": "doctor",
}
"""Each verb, in the order of use, and the module of `terakoya.commands` that holds it as `command` or as `app`."""

for verb, module_name in VERBS.items():
    if importlib.util.find_spec(f"terakoya.commands.{module_name}"):
        module = importlib.import_module(f"terakoya.commands.{module_name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(module.command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"terakoya {__version__}")
        raise typer.Exit


@app.callback()
def options(
    plugin: Annotated[
        list[str] | None, typer.Option(metavar="FILE_OR_MODULE", help="Load this plugin too; may be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help='Leave this plugin out; "third-party" leaves out all that did not come along.'
        ),
    ] = None,
    trace_plugins: Annotated[bool, typer.Option("--trace-plugins", help="Log every call of a plugin.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What comes before the verb: which plugins are loaded."""
    from terakoya import log

    log.configure()
    if trace_plugins:
        os.environ["TERAKOYA_TRACE_PLUGINS"] = "1"
    if plugin or without:
        from terakoya import plugins

        plugins.load(plugin or (), without or ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, or 2 after an error that the user can mend, printed without a traceback."""
    try:
        app(list(arguments) if arguments is not None else None)
    except UserError as error:
        if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
            raise
        from terakoya.log import error_console

        error_console().print("[bold red]error:[/bold red]", end=" ")
        error_console().print(str(error), markup=False, soft_wrap=True)
        sys.exit(2)
