"""Reading parameter JSON: duplicate keys and secrets are refused, the command line overrides values, errors name the
key path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from terakoya.errors import UserError, nearest
from terakoya.folder_kinds import missing_file
from terakoya.log import hide_secrets

Origin = Literal["default", "file", "command line"]

NOTES = ("$schema", "_comment")
"""Keys at the top of a file that are for its editor and its readers: they are accepted and not read."""

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

SECRET_KEY = re.compile(
    r"(^|[_-])(token|secret|password|passwd|passphrase|authorization|credentials?|(api|access|secret|private)[_-]?key)$",
    re.I,
)


def read_json(path: Path, *, notes: bool = False) -> dict[str, Any]:
    """Returns the object in the JSON file `path`, without `NOTES` unless `notes`.

    Raises:
        UserError: there is no such file, it is not valid JSON, a key is given twice, a number is NaN or Infinity, or
            the top level is not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"{path}: {missing_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                both = f"{short_json(seen[key])} and as {short_json(value)}"
                raise UserError(f'{path}: the key "{key}" is given twice, as {both}; keep one')
            seen[key] = value
        return seen

    def refuse_constant(name: str) -> Any:
        raise UserError(f"{path}: expected a number, got {name}")

    try:
        raw = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}{explain_syntax(path, text, error)}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, got {short_json(raw)}")
    return raw if notes else without_notes(raw)


def without_notes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object `raw` without `NOTES`."""
    return {key: value for key, value in raw.items() if key not in NOTES}


def explain_syntax(path: Path, text: str, error: json.JSONDecodeError) -> str:
    """Returns where `text`, the content of `path`, is not JSON, what is there, and what to write instead."""
    if not text.strip():
        return ": is empty; expected a JSON object, {...}"
    if is_yaml(path, text):
        return (
            ": is YAML; expected JSON. Convert it: python -c 'import json, sys, yaml; "
            f"print(json.dumps(yaml.safe_load(sys.stdin), indent=2))' < {path} > {path.with_suffix('.json').name}"
        )
    at = error.pos
    before, after = text[:at].rstrip(), text[at:].lstrip()
    if not after:
        advice = "the file ends too early; a bracket or a quote is not closed"
    elif after[:1] in ("}", "]") and before.endswith(","):
        at, advice = len(before) - 1, f"a comma before the closing {after[0]}; remove the comma"
    elif after.startswith(("//", "/*", "#")):
        advice = 'a comment; JSON has no comments: remove it, or write it as a key "_comment" at the top of the file'
    elif "," in error.msg and "Expecting" in error.msg:
        at, advice = len(before), f"expected a comma before {_excerpt(after)}; add it here"
    elif after.startswith("'"):
        advice = f'{_excerpt(after)}: JSON has "double quotes" round names and texts'
    elif word := re.match("|".join(_PYTHON_WORDS), after):
        advice = f"{word[0]}: JSON writes {_PYTHON_WORDS[word[0]]}"
    elif error.msg.startswith("Unterminated string"):
        advice = f"{_excerpt(after)}: the quote is not closed in its line; add the closing one"
    else:
        advice = f"{error.msg}, got {_excerpt(after)}"
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f":{line}:{column}: not valid JSON: {advice}"


def is_yaml(path: Path, text: str) -> bool:
    """Returns whether `text`, the content of `path`, is YAML, by its name or by its first line."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return path.suffix.lower() in (".yaml", ".yml") or bool(re.match(r"---|- |[\w.-]+:(\s|$)", first))


def _excerpt(text: str) -> str:
    line = text.partition("\n")[0].strip()
    return line if len(line) <= 30 else line[:27] + "..."


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
        except json.JSONDecodeError:
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


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raises UserError for a key or value that looks like a secret: parameters are copied into every run."""
    for path, value in leaves(raw):
        key = path.rpartition(".")[2]
        if isinstance(value, str) and value and (SECRET_KEY.search(key) or hide_secrets(value) != value):
            raise UserError(
                f"{source}: {path}: looks like a secret; parameters are copied into every run and checkpoint. "
                "Remove it and use an environment variable"
            )


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


def short_json(value: Any) -> str:
    """Returns `value` as JSON, cut to at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# ------------------------------------------------------------------------------------------- pydantic's errors


def explain(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str = "",
    *,
    explain_unknown: Callable[[str], str] = lambda path: "",
) -> list[str]:
    """Returns one line for each problem: key path, expected value, given value, the nearest known name.

    `explain_unknown` returns the end of the line for the key path of an unknown key, or "": then the nearest known
    keys are named, or all known keys, once for each object.
    """
    lines = []
    listed: set[str] = set()
    for problem in error.errors(include_url=False):
        keys = [str(key) for key in problem["loc"]]
        path = ".".join([prefix, *keys] if prefix else keys)
        kind, got = problem["type"], problem["input"]
        if kind == "extra_forbidden":
            known = field_names(_model_at(model, keys[:-1]))
            advice = explain_unknown(path) or _nearest_key(keys[-1], known)
            text = "unknown key" + ("" if advice in listed else advice)
            if advice.startswith("; known: "):
                listed.add(advice)
        elif kind == "missing":
            text = "missing"
        elif kind in ("value_error", "assertion_error"):
            text = str(problem["ctx"]["error"])
        else:
            expected = problem["msg"].replace("Input should be a valid list or tuple", "expected a list")
            expected = expected.replace("Input should be a valid integer", "expected an integer")
            expected = expected.replace("Input should be a valid boolean", "expected true or false")
            expected = expected.replace("a valid tuple", "a list").replace("a valid dictionary", "an object")
            expected = expected.replace("Input should be ", "expected ").replace("a valid ", "a ").replace("'", '"')
            expected = re.sub(r" or instance of \w+", "", expected)
            text = f"{expected}, got {short_json(got)}"
        line = f"{path}: {text}" if path else text
        if line not in lines:
            lines.append(line)
    return lines


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """Returns `nearest`; if no key is near, the keys that contain the words of `key`: `min_characters` for `min`."""
    text = nearest(key, known)
    parts = set(key.lower().split("_"))
    longer = [f'"{name}"' for name in known if parts <= set(name.split("_"))]
    if "did you mean" not in text and 1 <= len(longer) <= 3:
        return f"; did you mean {' or '.join(longer)}?"
    return text


def field_names(model: type[BaseModel] | None) -> list[str]:
    """Returns the keys that `model` accepts in JSON."""
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    """Returns the model that describes the object at `keys` below `model`, None if no model does."""
    current: type[BaseModel] | None = model
    named = False
    for key in keys:
        if current is None:
            return None
        if key.isdigit() or named:
            named = False
            continue  # an item of a list or an object: the key of the list or object has selected its model already
        field = current.model_fields.get(key)
        current = next(_models_in(field.annotation), None) if field else None
        named = field is not None and get_origin(field.annotation) is dict
    return current


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields every pydantic model in a type annotation."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
