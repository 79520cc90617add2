"""Values by their dotted key path: overriding them, listing them, where each came from, and which are secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from terakoya.errors import UserError
from terakoya.json_settings.short_json import short_json
from terakoya.log import hide_secrets

Origin = Literal["default", "file", "command line"]

SECRET_KEY = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|authorization|credentials?|(api|access|secret|private)[_-]?key)$",
    re.I,
)
_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9_]*)=[\"']?[^\s\"'$`;&|)]")
"""An environment variable that a line of bash sets to a text, and not to what a variable or a command holds."""


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns `raw` with each `a.b=value` of `overrides` set. A value that parses as JSON is JSON, any other a string.

    A number in a path is a list index. Raises UserError for a path that does not exist.
    """
    result: dict[str, Any] = json.loads(json.dumps(raw))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise UserError(f'--set {override}: expected KEY.KEY=VALUE, for example "schedule.warmup_steps=10"')
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        keys = path.split(".")
        place: Any = result
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            above = ".".join(keys[:depth])
            if isinstance(place, dict):
                if not last and place.get(key) is None:
                    place[key] = {}
            elif isinstance(place, list):
                if not key.isdigit() or int(key) >= len(place):
                    raise UserError(
                        f"--set {override}: {above} is a list: expected an index below {len(place)}, got {key}"
                    )
            else:
                raise UserError(f"--set {override}: {above} is {short_json(place)}, which has no keys")
            step: Any = int(key) if isinstance(place, list) else key
            if last:
                place[step] = value
            else:
                place = place[step]
    return result


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every (dotted key path, value) of nested JSON; empty lists and objects count as values."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = enumerate(value)
    found = False
    for key, inner in items:
        found = True
        yield from leaves(inner, f"{path}.{key}" if path else str(key))
    if not found:
        yield path, value


def value_at(value: Any, path: str) -> Any:
    """Returns the value at the dotted key `path` of nested JSON, None if there is none."""
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def origins(complete: Mapping[str, Any], raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Origin]:
    """Returns the origin of the value at every key path of the `complete` parameters."""
    given = [override.partition("=")[0] for override in overrides]
    in_file = [path for path, _ in leaves(raw)]

    def under(path: str, prefixes: Iterable[str]) -> bool:
        # a store given as a plain string stands for its object, so everything below a given path is given too
        return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)

    return {
        path: "command line" if under(path, given) else "file" if under(path, in_file) else "default"
        for path, _ in leaves(complete)
    }


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raises UserError for a key or value that looks like a secret, or that sets an environment variable to one:
    parameters are copied into every run, settings of launchers into scripts."""
    for path, value in leaves(raw):
        if not isinstance(value, str) or not value:
            continue
        if SECRET_KEY.search(path.rpartition(".")[2]) or looks_secret(value):
            raise UserError(
                f"{source}: {path}: looks like a secret; settings are copied into runs, checkpoints and job scripts. "
                "Remove it and use an environment variable, or $(cat FILE) in a line of bash"
            )


def looks_secret(text: str, *, assigned: bool = True) -> bool:
    """Returns whether `text` holds what looks like a secret or, where `assigned`, sets an environment variable that is
    called like one."""
    names = _ASSIGNMENT.findall(text) if assigned else ()
    return any(SECRET_KEY.search(name) for name in names) or hide_secrets(text) != text
