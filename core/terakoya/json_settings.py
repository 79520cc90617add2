"""Reading settings, as JSON with comments or as YAML: duplicate keys and secrets are refused, the command line
overrides values, errors name the line or the key path."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

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


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the object in the settings file `path`, without `NOTES`: YAML if its name ends in .yaml or .yml, else
    JSON, which may have comments (`//`, `/* */`) and a comma after the last entry.

    Raises:
        UserError: there is no such file, it is neither JSON nor YAML, a key is given twice, a number is NaN or
            Infinity, or the top level is not an object.
    """
    return _object(path, read_value(path))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the JSON file `path`, which a program wrote, without `NOTES`: no comments, no YAML. Raises
    UserError as `read_settings` does."""
    return _object(path, _parse_json(path, _text_of(path)))


def read_value(path: Path) -> Any:
    """Returns the value in the settings file `path`, of any type. Raises UserError as `read_settings` does."""
    text = _text_of(path)
    if _is_yaml_name(path) or (path.suffix.lower() != ".json" and looks_like_yaml(text)):
        return _parse_yaml(path, text)
    return _parse_json(path, text, _strict_json(text))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"{path}: {missing_file(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: {error}; save it as UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _object(path: Path, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        kind = "keys with values" if _is_yaml_name(path) else "a JSON object"
        raise UserError(f"{path}: expected {kind}, got {short_json(raw)}")
    return without_notes(raw)


def without_notes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object `raw` without `NOTES`."""
    return {key: value for key, value in raw.items() if key not in NOTES}


_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.S)
_LAST_COMMAS = re.compile(rf"({_STRING}|[\w}}\]])(\s*),(?=\s*[}}\]])|{_STRING}")


def _strict_json(text: str) -> str:
    """Returns `text` with spaces for its comments and for commas after last entries, so that every place stays."""
    text = _COMMENTS.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
    return _LAST_COMMAS.sub(lambda found: f"{found[1]}{found[2]} " if found[1] else found[0], text)


def _parse_json(path: Path, original: str, text: str | None = None) -> Any:
    """Returns the value of the JSON `text`, which has every character at its place in the `original`."""
    text = original if text is None else text

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(_given_twice(f"{path}{_place(text, _second(text, key))}", key, seen[key], value))
            seen[key] = value
        return seen

    def refuse_constant(name: str) -> Any:
        at = next(found.start() for found in re.finditer(rf"{name}|{_STRING}", text) if found[0] == name)
        raise UserError(f"{path}{_place(text, at)}: expected a number, got {name}")

    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}{explain_syntax(path, original, error)}") from None
    except RecursionError:
        raise UserError(f"{path}: its lists and objects are nested too deep") from None


def _second(text: str, key: str) -> int:
    """Returns the position at which an object of the JSON `text` names `key` for the second time."""
    open_objects: list[set[str]] = []
    for found in re.finditer(rf"({_STRING})(\s*:)?|[\[{{}}\]]", text):
        if found[0] in ("{", "["):
            open_objects.append(set())
        elif found[0] in ("}", "]"):
            open_objects.pop()
        elif found[2]:
            name = json.loads(found[1])
            if name == key and name in open_objects[-1]:
                return found.start()
            open_objects[-1].add(name)
    return 0


def _place(text: str, at: int) -> str:
    return f":{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def _given_twice(where: str, key: str, first: Any, second: Any) -> str:
    return f'{where}: the key "{key}" is given twice, as {short_json(first)} and as {short_json(second)}; keep one'


def explain_syntax(path: Path, text: str, error: json.JSONDecodeError) -> str:
    """Returns where `text`, the content of `path`, is not JSON, what is there, and what to write instead."""
    if not text.strip():
        return ": is empty; expected a JSON object"
    if looks_like_yaml(text):
        return f": is YAML; give it a name that ends in .yaml, such as {path.with_suffix('.yaml').name}"
    at = error.pos
    before, after = text[:at].rstrip(), text[at:].lstrip()
    if error.msg == "Extra data" and "\n" not in before.lstrip() and after.startswith(("{", "[")):
        inside = path.with_name("parameters.json")
        return (
            ": holds a JSON value in each line, as a corpus and a run's metrics.jsonl do; expected one JSON object, "
            "{...}" + (f"; did you mean {inside}?" if inside.is_file() else "")
        )
    if not after:
        advice = "the file ends too early; a bracket or a quote is not closed"
    elif after[:1] in ("}", "]") and before.endswith(","):
        at, advice = len(before) - 1, f"a comma before the closing {after[0]}; remove the comma"
    elif after.startswith(",") and before.endswith((",", "{", "[")):
        advice = "a comma with nothing before it; remove it"
    elif after.startswith("/*"):
        advice = "a comment that is not closed; add */"
    elif after.startswith("//"):
        advice = "a comment, which this file cannot have; remove it"
    elif after.startswith("#"):
        advice = "a comment; write // before a comment in JSON, or give the file a name that ends in .yaml"
    elif "," in error.msg and "Expecting" in error.msg:
        at, advice = len(before), f"expected a comma before {_excerpt(after)}; add it here"
    elif after.startswith("'"):
        advice = f'{_excerpt(after)}: JSON has "double quotes" round names and texts'
    elif word := re.match("|".join(_PYTHON_WORDS), after):
        advice = f"{word[0]}: JSON writes {_PYTHON_WORDS[word[0]]}"
    elif error.msg == "Extra data":
        advice = f"{_excerpt(after)} after the end of the JSON value; remove it, or a bracket that closes too early"
    elif error.msg.startswith("Unterminated string"):
        advice = f"{_excerpt(after)}: the quote is not closed in its line; add the closing one"
    else:
        advice = f"{error.msg}, got {_excerpt(after)}"
    return f"{_place(text, at)}: not valid JSON: {advice}"


def _is_yaml_name(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def looks_like_yaml(text: str) -> bool:
    """Returns whether `text` is YAML and not JSON, by its first line that is not a comment."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return bool(re.match(r"(---|-|[\w.$-]+:)(\s|$)", first))


# ------------------------------------------------------------------------------------------- YAML

_TAG = "tag:yaml.org,2002:"
_SCALARS: Mapping[str, tuple[str, Sequence[str]]] = {
    "null": ("~|null|Null|NULL|", ("~", "n", "N", "")),
    "bool": ("true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
}
"""Tag -> what plain text has it, and the first characters of such text: the core schema of YAML 1.2. PyYAML has that of
YAML 1.1, in which 1e-4 is text, `no` is false and 24:00:00 is 86400."""
_MOST_YAML_VALUES = 100_000
"""Aliases of aliases can make a short file larger than memory."""


def _parse_yaml(path: Path, text: str) -> Any:
    """Returns the value of the YAML `text` as JSON has it: keys are text as written, tags and dates do not exist."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    for tag, (pattern, first) in _SCALARS.items():
        Loader.add_implicit_resolver(_TAG + tag, re.compile(f"^(?:{pattern})$"), list(first))
    try:
        node = yaml.compose(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        advice = "; indent with spaces, not with tabs" if "\\t" in problem else ""
        raise UserError(f"{path}{where}: not valid YAML: {problem}{advice}") from None
    except RecursionError:
        raise UserError(f"{path}: its lists and objects are nested too deep") from None
    if node is None:
        raise UserError(f"{path}: is empty; expected keys with values")
    count = 0

    def value(node: Any, above: tuple[Any, ...]) -> Any:
        nonlocal count
        count += 1
        where = f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        if any(node is each for each in above):
            raise UserError(f"{where}: an alias stands inside of what it names; write the value out")
        if count > _MOST_YAML_VALUES:
            raise UserError(f"{where}: aliases make the file larger than {_MOST_YAML_VALUES:,} values; write less")
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [value(each, (*above, node)) for each in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                place = f"{path}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1}"
                if not isinstance(key_node, yaml.ScalarNode):
                    raise UserError(f"{place}: expected text as a key, got a list or an object")
                key, entry = key_node.value, value(value_node, (*above, node))
                if key in result:
                    raise UserError(_given_twice(place, key, result[key], entry))
                result[key] = entry
            return result
        return _yaml_scalar(node.tag, node.value, where)

    return value(node, ())


def _yaml_scalar(tag: str, text: str, where: str) -> Any:
    kind = tag.removeprefix(_TAG)
    try:
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text, 0 if text[:2] in ("0o", "0x") else 10)
            case "float" if math.isfinite(float(text)):
                return float(text)
    except (KeyError, ValueError):
        pass  # a tag of the user's own before another kind of value: !!int x
    if kind in ("int", "float"):
        raise UserError(f"{where}: expected a number, got {text}")
    raise UserError(f"{where}: the tag {tag} is not supported; remove it")


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
            expected = re.sub(r", unable to parse string as an? \w+$", "", expected)
            text = f"{expected}, got {short_json(got)}"
            if expected == "expected a list" and isinstance(got, str):
                instead = f"write {short_json([got])}"
                text += f"; {instead}"
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
