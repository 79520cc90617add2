"""Settings of a tokenizer, exporter, importer or launcher from the command line: a file, --set, and flags."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from typer.core import TyperCommand

from terakoya.commands.guidance import unknown_options
from terakoya.errors import UserError


class VerbCommand(TyperCommand):
    """A verb. What has not the form of an option is a value, whatever it begins with: `- text`, `-1`, `-東京`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts values behind `--`: the parser would read one that begins with a dash as options of one letter, and an
        `h` in it as a call for help."""
        if ctx.resilient_parsing:
            return list(super().parse_args(ctx, args))
        parameters = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        own: dict[str, Any] = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
        options: list[str] = []
        values: list[str] = []
        words = iter(args)
        for word in words:
            name = word.partition("=")[0]
            is_option = name in own if self.ignore_unknown_options else re.fullmatch(r"--?[A-Za-z][\w-]*", name, re.A)
            if word == "--":
                values += words
            elif word in ctx.help_option_names and values and _takes_text(values[-1]):
                values[-1] += f"={word}"
            elif is_option and word in own and not own[word].is_flag:
                following = next(words, None)
                options += [word] if following is None else [word, following]
                values = [] if following is None else values  # the parser says that a value is missing
            elif is_option:
                options.append(word)
            else:
                values.append(word)
        return list(super().parse_args(ctx, [*options, *(["--", *values] if values else ())]))


class ComponentCommand(VerbCommand):
    """A verb that takes options that it does not know as arguments: they are the component's own settings."""

    ignore_unknown_options = allow_extra_args = True


def _takes_text(word: str) -> bool:
    """Returns whether `word` is an option without its value, of a setting that is no switch in some component."""
    from terakoya.plugins import registry

    key = word.removeprefix("--").replace("-", "_")
    kinds = ("tokenizers", "launchers", "exporters", "importers") if word.startswith("--") else ()
    components = (registry().component(kind, name) for kind in kinds for name in registry().names(kind))
    return any(key in each.model_fields and not _is(each.model_fields[key].annotation, bool) for each in components)


def gather(
    file: Mapping[str, Any], overrides: Sequence[str], flags: Mapping[str, Any], *, where: str = "--settings"
) -> dict[str, Any]:
    """Merges the settings in `file` (called `where` in errors), `--set KEY=VALUE` and flags into one mapping.

    `--set` overrides the value in the file. Raises UserError for a key that is given twice in any other way.
    """
    from terakoya.json_settings import apply_overrides

    keys = [override.partition("=")[0] for override in overrides]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--set {key}: the key is given twice; keep one")
    for name in flags:
        for other, given in ((where, file), ("--set", keys)):
            if name in given:
                raise UserError(f'"{name}" is given twice, as --{name.replace("_", "-")} and in {other}; keep one')
    return {**apply_overrides(file, overrides), **flags}


def take_flags(arguments: Sequence[str], fields: Mapping[str, Any], *, verb: str) -> tuple[list[str], dict[str, Any]]:
    """Extracts `--key value`, `--key=value`, `--switch` and `--no-switch` from `arguments`; returns the remaining
    arguments and key -> value.

    `fields` are the component's pydantic fields by name. Dashes in a flag may be written as underscores. Raises
    UserError for a flag that is given twice or has no value, and for one of another program that `verb` answers.
    """
    rest: list[str] = []
    taken: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or argument == "--":
            rest.append(argument)
            continue
        name, equals, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        given = text if equals else next((word for word in remaining[:1] if _is_value(word, fields)), None)
        if key not in fields and (advice := unknown_options.answer(verb, key, given)):
            raise UserError(f"terakoya {verb}: {argument}: no such option; {advice}")
        annotation = fields[key].annotation if key in fields else None
        positive = key.removeprefix("no_")
        value: Any
        if not equals and key not in fields and positive in fields and _is(fields[positive].annotation, bool):
            key, value = positive, False
        elif not equals and _is(annotation, bool) and not (remaining and remaining[0].lower() in ("true", "false")):
            value = True
        else:
            if not equals:
                if given is None:
                    raise UserError(
                        f"{argument}: expected a value after it; one that begins with two dashes is written "
                        f"{argument}=VALUE"
                    )
                text = remaining.pop(0)
            value = text.lower() == "true" if text.lower() in ("true", "false") else _value(text, annotation)
            if _is(annotation, int) and isinstance(value, str) and value != "null":
                raise UserError(f"{argument}: expected an integer, got {text}")
        if key in taken:
            raise UserError(f"{argument}: the option is given twice; keep one")
        taken[key] = value
    return rest, taken


def _is_value(word: str, fields: Collection[str]) -> bool:
    """Returns whether `word` is a value and no option: `--x=y` is a value where the component has no setting `x`."""
    name, equals, _ = word.removeprefix("--").partition("=")
    return not word.startswith("--") or bool(equals and name.replace("-", "_") not in fields)


def _value(text: str, annotation: Any) -> Any:
    """Returns `text` itself where a string is expected, else the JSON value if it is valid JSON, else `text`."""
    if _is(annotation, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is(annotation: Any, kind: type) -> bool:
    """Returns whether `annotation` is `kind`, or `kind | None`, with checks or without."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is(arguments[0], kind)
    if origin in (Union, UnionType):
        return all(_is(each, kind) for each in arguments if each is not type(None))
    return bool(annotation is kind)
