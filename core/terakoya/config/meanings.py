"""What a setting means, from its one source: the docstring below a field, or the `description` of its type.

A docstring may end with two notes, which are shown by themselves: `Unit: seconds.`, and `Since: 0.2.` for a setting
that came after the first release. Docstrings are read from the source code when they are asked for: pydantic's
`use_attribute_docstrings` would read them at every start, which took 0.4 seconds.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

_NOTE = re.compile(r"\s*\b(Unit|Since): ([^.]*(?:\.\d+)*)\.(?=\s|$)")
_BASES = ("builtins", "pydantic", "abc", "typing")

FIRST_RELEASE = "0.1"
"""The version since which a setting without `Since:` is there."""


class Setting(NamedTuple):
    """One key of a settings file.

    Attributes:
        name: the key's name, in the object that holds it.
        kind: its type and bounds in words: `integer, at least 1`.
        default: the default as JSON, or "(required)".
        meaning: what it does, without its unit and version; "" if it is not written down.
        unit: the unit of its value; "" where it has none.
        since: the first version that has it.
    """

    name: str
    kind: str
    default: str
    meaning: str
    unit: str
    since: str


@cache
def settings_of(model: type[BaseModel]) -> Sequence[Setting]:
    """Returns the settings of `model`, in the order in which its fields are declared."""
    schema = model.model_json_schema(by_alias=True, schema_generator=DescribedSchema)
    # a model that JSON may also give in a shorter form has its properties in one of several choices
    forms = (schema, *schema.get("anyOf", ()))
    properties: Mapping[str, Any] = next((form["properties"] for form in forms if "properties" in form), {})
    texts = descriptions(model)
    result = []
    for name, field in model.model_fields.items():
        text = texts.get(name, "")
        notes = {match[1]: match[2] for match in _NOTE.finditer(text)}
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        result.append(
            Setting(
                name=field.alias or name,
                kind=kind_of_value(properties.get(field.alias or name, {}), schema.get("$defs", {})),
                default="(required)" if field.is_required() else default_text(default),
                meaning=_NOTE.sub("", text),
                unit=notes.get("Unit", ""),
                since=notes.get("Since", FIRST_RELEASE),
            )
        )
    return result


def default_text(value: Any) -> str:
    """Returns a default as JSON; an object of settings as `{...}`, whose keys have entries of their own."""
    if isinstance(value, BaseModel):
        return "{...}"
    return json.dumps(value, default=str, ensure_ascii=False)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns field -> its description, notes included, in one line. A field without a description is left out."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.split(".")[0] not in _BASES:
            found.update(_docstrings_of_module(base.__module__).get(base.__qualname__, {}))
    for name, field in model.model_fields.items():
        if field.description:
            found.setdefault(name, field.description)
    return {name: " ".join(found[name].split()) for name in model.model_fields if name in found}


def summary(model: type[BaseModel]) -> str:
    """Returns the first paragraph of the docstring of `model`, in one line."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


@cache
def _docstrings_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Returns class -> field -> the docstring below it, for the classes of a module; none without source code."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return dict(_classes(tree, ""))


def _classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            own = {}
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    match text:
                        case ast.Expr(ast.Constant(str() as words)):
                            own[field.target.id] = words
            yield prefix + node.name, own
            yield from _classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _classes(node, f"{prefix}{node.name}.<locals>.")


class DescribedSchema(GenerateJsonSchema):
    """pydantic's JSON Schema, in which each property has its description."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        model = schema["cls"]
        texts = descriptions(model)
        for name, field in model.model_fields.items():
            entry = result.get("properties", {}).get(field.alias or name)
            if entry is not None and name in texts:
                entry["description"] = texts[name]
        if "description" in result:
            result["description"] = " ".join(result["description"].split("\n\n")[0].split())
        return result


# ------------------------------------------------------------------------------------------- types in words


def kind_of_value(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Returns the values that a JSON Schema accepts, in words: `integer, at least 1, or null`."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        kinds = list(dict.fromkeys(kind_of_value(each, definitions) for each in choices))
        if "null" in kinds:
            kinds = [*(kind for kind in kinds if kind != "null"), "null"]
        return " or ".join(kinds)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = definitions.get(name, {})
        return kind_of_value(target, definitions) if "anyOf" in target else "object"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return _kind_of_list(schema, definitions)
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_inner(values, definitions)}" if isinstance(values, Mapping) and values else "object"
    words = {"boolean": "true or false", "string": "path" if schema.get("format") == "path" else "text"}
    bounds = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
    }
    limits = [text.format(f"{schema[key]:g}") for key, text in bounds.items() if abs(schema.get(key, 2**53)) < 2**53]
    return " ".join([words.get(str(kind), str(kind or "any value")), " and ".join(limits)]).strip()


def _kind_of_list(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    items = schema.get("prefixItems") or []
    if items:
        kinds = list(dict.fromkeys(kind_of_value(item, definitions) for item in items))
        return f"list of {len(items)}: " + ", ".join(kinds)
    return f"list of {_inner(schema.get('items', {}), definitions)}"


def _inner(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kind = kind_of_value(schema, definitions)
    return f"({kind})" if " or " in kind else kind
