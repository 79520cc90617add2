"""The settings of a tokenizer, exporter or importer as the command line gives them: a file, --set, and flags."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from terakoya.errors import UserError

FLAGS = {"ignore_unknown_options": True}
"""Options that a command does not know are the kind's own settings; they arrive among the arguments."""


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in `file`: YAML if its name ends in .yaml or .yml, else JSON.

    Raises UserError: no such file, not readable, a key given twice, no object at the top.
    """
    from terakoya.json_settings import read_json, shown

    if file.suffix.lower() not in (".yaml", ".yml"):
        return read_json(file)
    import yaml

    class Once(yaml.SafeLoader):
        """Refuses a key that stands twice in one mapping; the library would take the last in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: dict[Any, str] = {}
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                value = getattr(value_node, "value", "")
                if key in seen:
                    raise UserError(
                        f'{file}:{key_node.start_mark.line + 1}: the key "{key}" is given twice, as {shown(seen[key])} '
                        f"and as {shown(value)}; keep one"
                    )
                seen[key] = value
            return dict(super().construct_mapping(node, deep))

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Once)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file}: no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected keys with values, got {shown(content)}")
    return {str(key): value for key, value in content.items()}


def gather(
    file: Mapping[str, Any], overrides: Sequence[str], flags: Mapping[str, Any], *, where: str = "--settings"
) -> dict[str, Any]:
    """One mapping of the settings in `file` (which errors call `where`), `--set KEY=VALUE` and flags.

    `--set` takes the place of the file's value: that is what it is for. Raises UserError for a key that is given in any
    other way more than once.
    """
    from terakoya.json_settings import with_overrides

    keys = [override.partition("=")[0] for override in overrides]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--set {key}: the key is given twice; keep one")
    for name in flags:
        for other, given in ((where, file), ("--set", keys)):
            if name in given:
                raise UserError(f'"{name}" is given twice, as --{name.replace("_", "-")} and in {other}; keep one')
    return {**with_overrides(file, overrides), **flags}


def take_flags(arguments: Sequence[str], fields: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Takes `--key value`, `--key=value`, `--switch` and `--no-switch` out of `arguments`: (the rest, key -> value).

    `fields` are the kind's settings by name, pydantic's. Dashes in a name may be written as underscores. Raises
    UserError for a flag that is given twice or lacks its value.
    """
    rest: list[str] = []
    taken: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument == "--":
            rest.append(argument)
            continue
        name, equals, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        annotation = fields[key].annotation if key in fields else None
        positive = key.removeprefix("no_")
        value: Any
        if not equals and key not in fields and positive in fields and _is(fields[positive].annotation, bool):
            key, value = positive, False
        elif not equals and _is(annotation, bool) and not (waiting and waiting[0].lower() in ("true", "false")):
            value = True
        else:
            if not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise UserError(f"{argument}: expected a value behind it")
                text = waiting.pop(0)
            value = text.lower() == "true" if text.lower() in ("true", "false") else _value(text, annotation)
        if key in taken:
            raise UserError(f"{argument}: the option is given twice; keep one")
        taken[key] = value
    return rest, taken


def _value(text: str, annotation: Any) -> Any:
    """What `text` means: as it is where a text is expected, else JSON where it parses as such."""
    if _is(annotation, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is(annotation: Any, kind: type) -> bool:
    """Whether `annotation` is `kind`, or `kind` and None."""
    arguments: Iterable[Any] = get_args(annotation) or (annotation,)
    return {each for each in arguments if each is not type(None)} == {kind}
