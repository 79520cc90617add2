"""A component as a setting of another one: a JSON object with a "type", as at the top of the parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from terakoya import plugins
from terakoya.components import KINDS, Component
from terakoya.errors import UserError
from terakoya.json_settings import explain, short_json


@dataclass(frozen=True)
class NestedComponent:
    """Annotates a field that holds a component of any registered type: `Annotated[Architecture,
    NestedComponent("architectures")]`. It is written and read with its type.

    Attributes:
        kind: a key of `components.KINDS`.
        name_alone: whether the type alone, a string, is accepted, too.
        optional: whether the field may be None.
    """

    kind: str
    name_alone: bool = False
    optional: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The component itself, or the JSON object that describes it."""
        serialise = core_schema.plain_serializer_function_ser_schema(self._serialise)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=serialise)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """An object with a type; what else it holds is up to the type."""
        text = f"Which of the {self.kind} it is."
        name = {"type": "string", "description": text}
        described = {"type": "object", "properties": {"type": name}, "required": ["type"]}
        return {"anyOf": [{"type": "string"}, described]} if self.name_alone else described

    def _validate(self, value: Any) -> Component | None:
        if isinstance(value, KINDS[self.kind]) or (value is None and self.optional):
            return value
        if self.name_alone and isinstance(value, str):
            value = {"type": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise ValueError(f'expected an object with a "type", got {short_json(value)}')
        try:
            component = plugins.registry().component(self.kind, value["type"])
        except UserError as error:
            raise ValueError(f"type: {error}") from None
        settings = {key: inner for key, inner in value.items() if key != "type"}
        try:
            made: Component = component.model_validate_json(json.dumps(settings), strict=True)
        except ValidationError as error:
            raise ValueError("; ".join(explain(error, component))) from None
        return made

    def _serialise(self, value: Component | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"type": plugins.registry().name_of(self.kind, type(value)), **value.model_dump(mode="json")}
