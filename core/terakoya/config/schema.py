"""The JSON Schema of a parameter file, for editors and for documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, create_model

from terakoya.config import batch_table
from terakoya.config.parameters import COMPONENTS, Parameters
from terakoya.plugins import Registry


def json_schema(registry: Registry) -> dict[str, Any]:
    """The schema of the files that `Parameters.load` reads: every installed component is one choice of its key, by its
    `type`."""
    fields: dict[str, Any] = {}
    for key, kind in COMPONENTS.items():
        if registry.names(kind):
            fields[key] = (_choice(registry, kind), ...)
    if registry.names("trackers"):
        trackers: Any = tuple[_choice(registry, "trackers"), ...]  # type: ignore[misc]
        fields["trackers"] = (trackers, ())
    plugins: dict[str, Any] = {
        name: (registry.component("events", name) | None, None) for name in registry.names("events")
    }
    if plugins:
        events = create_model("Events", __config__={"extra": "forbid"}, **plugins)
        fields["events"] = (events, Field(default_factory=dict))
    model: type[BaseModel] = create_model("Parameters", __base__=Parameters, **fields)
    schema = model.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["batch_size"] |= {
        "patternProperties": {
            f"^({batch_table.ONLY_NODE}|0|[1-9][0-9]*|{batch_table.NAME.pattern})$": {"type": "integer", "minimum": 1}
        },
        "additionalProperties": False,
        "minProperties": 1,
    }
    store = schema["$defs"]["TrainStore"]
    schema["$defs"]["TrainStore"] = {"anyOf": [{"type": "string"}, store]}
    return schema


def _choice(registry: Registry, kind: str) -> Any:
    """A type that is any component of `kind` with its `type`."""
    models: list[Any] = []
    for offer in registry.components():
        if offer.kind == kind:
            fields: dict[str, Any] = {"type": (Literal[offer.name], ...)}
            models.append(create_model(f"{kind}_{offer.name}", __base__=offer.component, **fields))
    if len(models) == 1:
        return models[0]
    union: Any = Union[tuple(models)]  # noqa: UP007 - made at run time
    return Annotated[union, Field(discriminator="type")]
