"""An architecture as a setting of another component: a JSON object with a "type", as at the top of the parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, ValidationError, WithJsonSchema

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.errors import UserError
from terakoya.json_settings import explain, short_json


def _validate(value: Any) -> Architecture:
    if isinstance(value, Architecture):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise ValueError(f'expected an object with a "type", got {short_json(value)}')
    try:
        component = plugins.registry().component("architectures", value["type"])
    except UserError as error:
        raise ValueError(f"type: {error}") from None
    settings = {key: inner for key, inner in value.items() if key != "type"}
    try:
        architecture: Architecture = component.model_validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        raise ValueError("; ".join(explain(error, component))) from None
    return architecture


def _serialise(value: Architecture) -> dict[str, Any]:
    return {"type": plugins.registry().name_of("architectures", type(value)), **value.model_dump(mode="json")}


NestedArchitecture = Annotated[
    Architecture,
    PlainValidator(_validate),
    PlainSerializer(_serialise),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"type": "string", "description": "Which of the architectures it is."}},
            "required": ["type"],
        }
    ),
]
"""An architecture of any registered type, written and read with its type."""
