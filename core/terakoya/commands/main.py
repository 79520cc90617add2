"""The command line: every command, the options common to all of them, and the output of errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from terakoya import log
from terakoya.commands import (
    average,
    demo,
    doctor,
    estimate,
    evaluate,
    export,
    finetune,
    fork,
    import_checkpoint,
    init,
    prepare,
    report,
    run,
    save,
    status,
    train,
    try_model,
    upload,
    verify,
)
from terakoya.commands.component_settings import ComponentCommand
from terakoya.commands.guidance import next_command, unknown_options
from terakoya.commands.guidance.examples import add_examples, complete_overview
from terakoya.commands.language.lines import wrap
from terakoya.commands.language.translate import chosen_translator
from terakoya.commands.launching import launch, move
from terakoya.commands.parameters import app as parameters
from terakoya.commands.plugins import app as plugins
from terakoya.commands.shared_options import plugin_options
from terakoya.commands.store import app as store
from terakoya.commands.tokenizer import app as tokenizer
from terakoya.errors import LASTING_EXIT_CODES, Stopped, UserError, describe_os_error, os_error_exit_code
from terakoya.version import __version__

DEBUG_VARIABLE = "TERAKOYA_DEBUG"

VERBS = (
    "demo", "init", "run", "tokenizer", "prepare", "store", "estimate", "train", "launch", "move", "fork", "status",
    "save", "report", "verify", "evaluate", "export", "average", "import", "try", "finetune", "upload", "plugins",
    "parameters", "doctor",
)  # fmt: skip
"""The commands in the order of use."""


class InOrder(TyperGroup):
    """Lists the commands in the order of use.

    Attributes:
        explain_usage: what the parser's own errors are in the user's language; None in English.
    """

    explain_usage: Callable[[Any], str | None] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands in the order of `VERBS`."""
        return sorted(self.commands, key=VERBS.index)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Keeps the arguments, which the advice for an unknown option quotes."""
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; an unknown option is answered with what to give instead."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            explained = unknown_options.explain(error, ctx.meta["arguments"])
            if explained is error and self.explain_usage is not None and (text := self.explain_usage(error)):
                explained = UserError(text)
            raise explained from None


app = typer.Typer(
    name="terakoya",
    cls=InOrder,
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    help="Trains language models from raw text: tokenizer, token store, pre-training, export.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("demo")(demo.command)
app.command("init")(init.command)
app.command("run")(run.command)
app.add_typer(tokenizer.app, name="tokenizer")
app.command("prepare")(prepare.command)
app.add_typer(store.app, name="store")
app.command("estimate")(estimate.command)
app.command("train")(train.command)
app.command("launch", cls=ComponentCommand)(launch.command)
app.command("move", cls=ComponentCommand)(move.command)
app.command("fork")(fork.command)
app.command("status")(status.command)
app.command("save")(save.command)
app.command("report")(report.command)
app.command("verify")(verify.command)
app.command("evaluate")(evaluate.command)
app.command("export", cls=ComponentCommand)(export.command)
app.command("average")(average.command)
app.command("import", cls=ComponentCommand)(import_checkpoint.command)
app.command("try")(try_model.command)
app.command("finetune")(finetune.command)
app.command("upload")(upload.command)
app.add_typer(plugins.app, name="plugins")
app.add_typer(parameters.app, name="parameters")
app.command("doctor")(doctor.command)
add_examples(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"terakoya {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    plugin: Annotated[
        list[str] | None, typer.Option(metavar="FILE_OR_MODULE", help="Load this plugin too; may be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='Exclude this plugin; "third-party" excludes all that are not bundled.'),
    ] = None,
    trace_plugins: Annotated[bool, typer.Option("--trace-plugins", help="Log every call of a plugin.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handles the options before the command: which plugins are loaded."""
    log.configure()
    if trace_plugins:
        os.environ["TERAKOYA_TRACE_PLUGINS"] = "1"
    if plugin or without:
        from terakoya.plugins import load

        load(plugin or (), without or ())
    context.with_resource(next_command.carrying(plugin_options(plugin, without)))


@cache
def command_line() -> Callable[..., Any]:
    """Returns the command line that typer builds from `app`, once a process: it reads the options of every command."""
    command: Any = typer.main.get_command(app)
    complete_overview(command)
    return command


@cache
def translated_command_line(translator: Callable[[str], str]) -> Callable[..., Any]:
    """Returns the command line with help and complaints about options as `translator` has them."""
    from terakoya.commands.language.help import explain_usage, translate_help

    command: Any = typer.main.get_command(app)
    complete_overview(command)
    translate_help(command, translator)
    command.explain_usage = explain_usage
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with 0, with 75 after training that stopped on request and saved, with 3
    after training that diverged, with 74 after an error that may pass, or with 2 after another that the user can fix,
    printed without a traceback."""
    try:
        log.translate_with(None)
        translator = chosen_translator()
        log.translate_with(translator, wrap)
        command: Any = command_line() if translator is None else translated_command_line(translator)
        command(list(arguments) if arguments is not None else None, prog_name="terakoya")
    except (UserError, OSError) as error:
        if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or (isinstance(error, OSError) and not error.errno):
            raise
        from terakoya.process_pool import is_said_already

        text = describe_os_error(error) if isinstance(error, OSError) else str(error)
        if not is_said_already(text):
            log.print_labelled("" if isinstance(error, Stopped) else "error:", text, style="bold red")
        code = os_error_exit_code(error.errno) if isinstance(error, OSError) else error.exit_code
        _note_lasting_code(code)
        if isinstance(error, UserError) and error.leaves_at_once:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)


def _note_lasting_code(code: int) -> None:
    """Tells the script that started this process, through a file, that starting it again is of no use."""
    from terakoya.training.distributed.signals import LASTING_CODE_FILE_VARIABLE

    if code in LASTING_EXIT_CODES and LASTING_CODE_FILE_VARIABLE in os.environ:
        with contextlib.suppress(OSError):  # the script then knows the highest code of all processes alone
            Path(os.environ[LASTING_CODE_FILE_VARIABLE]).write_text(str(code))
