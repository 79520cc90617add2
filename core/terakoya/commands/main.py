"""The command line: the verbs of the core and of plugins, the options that all have, and the output of errors."""

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

from terakoya import Command, Group, Language, log
from terakoya.commands import verbs
from terakoya.commands.component_settings import ComponentCommand, VerbCommand
from terakoya.commands.guidance import next_command, unknown_options
from terakoya.commands.guidance.examples import complete_overview, example_text
from terakoya.commands.shared_options import plugin_options
from terakoya.errors import LASTING_EXIT_CODES, Stopped, UserError, describe_os_error, nearest, os_error_exit_code
from terakoya.plugins.discovery import PLUGINS_VARIABLE, WITHOUT_VARIABLE, add_inherited
from terakoya.plugins.families import missing_family
from terakoya.plugins.verbs import Verbs, find_language, find_verbs
from terakoya.process_pool import is_said_already
from terakoya.version import __version__

DEBUG_VARIABLE = "TERAKOYA_DEBUG"


class VerbGroup(TyperGroup):
    """Says of a command that it lacks where it might be. `verbs` are all, with the plugins that might have more."""

    verbs: Verbs

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that `args` begin with; for one that does not exist says which plugins might have it."""
        if args[0] not in {*self.commands, *(unknown_options.COMMANDS if ctx.parent is None else ())}:
            name = f"{ctx.command_path} {args[0]}"
            family, plugins = missing_family("verbs", name.partition(" ")[2]), self.verbs.might_have
            if family or plugins:
                raise UserError(f"{name}: no such command{family or nearest(args[0], self.commands)}{plugins}")
        return super().resolve_command(ctx, args)


class InOrder(VerbGroup):
    """Lists the commands in the order of use. `explain_usage` returns what the parser's own errors are in the user's
    language; None in English."""

    explain_usage: Callable[[Any], str | None] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in self.verbs.commands if name in self.commands]

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


def _version(value: bool) -> None:
    if value:
        typer.echo(f"terakoya {__version__}")
        raise typer.Exit


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
    assert isinstance(context.command, InOrder)
    context.with_resource(next_command.carrying(plugin_options(plugin, without), context.command.commands))


@cache
def build_app(plugins: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> typer.Typer:
    """Returns the command line with the verbs of the core and of plugins, `plugins` among them, `without` not."""
    found = find_verbs(verbs.register_commands(), plugins, without)
    app = typer.Typer(
        name="terakoya",
        cls=type("Verbs", (InOrder,), {"verbs": found}),
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
        help="Trains language models from raw text: tokenizer, token store, pre-training, export.",
        epilog=example_text(next(each.example for each in found.commands.values() if isinstance(each, Command))),
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    groups: dict[str, typer.Typer] = {}
    for name, command in found.commands.items():
        group, _, verb = name.rpartition(" ")
        if isinstance(command, Group):
            continue
        if group and group not in groups:
            whole = found.commands[group]
            assert isinstance(whole, Group)
            groups[group] = typer.Typer(
                cls=type("Verbs", (VerbGroup,), {"verbs": found}),
                no_args_is_help=True,
                rich_markup_mode=None,
                help=whole.help,
            )
            app.add_typer(groups[group], name=group, epilog=example_text(command.example))  # that of its first verb
        kind, epilog = ComponentCommand if command.passes_options else VerbCommand, example_text(command.example)
        groups.get(group, app).command(verb, cls=kind, epilog=epilog)(command.function)
    return app


@cache
def command_line(
    plugins: tuple[str, ...] = (), without: tuple[str, ...] = (), language: Language | None = None
) -> Callable[..., Any]:
    """Returns what typer builds from `build_app`, once a process, as it reads the options of every command; with help
    and complaints about options in `language`."""
    command: Any = typer.main.get_command(build_app(plugins, without))
    complete_overview(command)
    if language is not None:
        language.translate_help(command, language.translate)
        command.explain_usage = language.explain_usage
    return command


def _before_the_verb(arguments: Sequence[str], option: str) -> tuple[str, ...]:
    """Returns the values of `option` among the arguments before the verb, which say which verbs there are."""
    values = []
    following = iter(arguments)
    for word in following:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            break
        if name in ("--plugin", "--without"):
            value = value if equals else next(following, "")
            values += [value] if name == option and value else []
    return tuple(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with 0, with 75 after training that stopped on request and saved, with 3
    after training that diverged, with 74 after an error that may pass, or with 2 after another that the user can fix,
    printed without a traceback."""
    try:
        log.translate_with(None)
        given = list(sys.argv[1:] if arguments is None else arguments)
        if given[:1] == [f"--local_rank={os.environ.get('LOCAL_RANK')}"]:
            del given[0]  # which some launchers give before all else
        without = add_inherited(WITHOUT_VARIABLE, _before_the_verb(given, "--without"))
        language = find_language(without)
        if language is not None:
            log.translate_with(language.translate, language.wrap)
        plugins = add_inherited(PLUGINS_VARIABLE, _before_the_verb(given, "--plugin"))
        command_line(plugins, without, language)(given, prog_name="terakoya")
    except Exception as error:
        code, leaves_at_once = 1, getattr(error, "leaves_at_once", False)
        debugs = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
        if isinstance(error, UserError | OSError) and not (debugs or (isinstance(error, OSError) and not error.errno)):
            text = describe_os_error(error) if isinstance(error, OSError) else str(error)
            if not is_said_already(text):
                log.print_labelled("" if isinstance(error, Stopped) else "error:", text, style="bold red")
            code = os_error_exit_code(error.errno) if isinstance(error, OSError) else error.exit_code
            _note_lasting_code(code)
        elif leaves_at_once:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            raise
        if leaves_at_once:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)


def _note_lasting_code(code: int) -> None:
    """Tells the script that started this process, through a file, that starting it again is of no use."""
    from terakoya.distributed.signals import LASTING_CODE_FILE_VARIABLE

    if code in LASTING_EXIT_CODES and LASTING_CODE_FILE_VARIABLE in os.environ:
        with contextlib.suppress(OSError):  # the script then knows the highest code of all processes alone
            Path(os.environ[LASTING_CODE_FILE_VARIABLE]).write_text(str(code))
