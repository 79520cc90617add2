"""YAML 1.2 as the JSON that it stands for: every key is text, and there are no tags and no dates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from terakoya.errors import UserError
from terakoya.json_settings.short_json import given_twice

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
LONGEST_INTEGER = 4300
"""The most digits of an integer that Python converts to decimal text again."""
_MOST_YAML_VALUES = 100_000
"""Aliases of aliases can make a short file larger than memory."""


def is_yaml_name(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def looks_like_yaml(text: str) -> bool:
    """Returns whether `text` is YAML and not JSON, by its first line that is not a comment."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return bool(re.match(r"(---|-|[\w.$-]+:)(\s|$)", first))


def parse_yaml(path: Path, text: str) -> Any:
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
                    raise UserError(given_twice(place, key, result[key], entry))
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
            case "int" if len(text) <= LONGEST_INTEGER:
                return int(text, 0 if text[:2] in ("0o", "0x") else 10)
            case "float" if math.isfinite(float(text)):
                return float(text)
    except (KeyError, ValueError):
        pass  # a tag of the user's own before another kind of value: !!int x
    if kind in ("int", "float"):
        raise UserError(f"{where}: expected a number, got {text[:60]}")
    raise UserError(f"{where}: the tag {tag} is not supported; remove it")
