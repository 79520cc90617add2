"""The JSON Schema of a parameter file, for editors and for documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, create_model

from terakoya.config import batch_table
from terakoya.config.meanings import DescribedSchema, descriptions, summary
from terakoya.config.parameters import COMPONENTS, Parameters
from terakoya.json_settings import NOTES
from terakoya.plugins import Registry


def json_schema(registry: Registry) -> dict[str, Any]:
    """The schema of the files that `Parameters.load` reads: every installed component is one choice of its key, by its
    `type`."""
    texts = descriptions(Parameters)
    fields: dict[str, Any] = {}
    for key, kind in COMPONENTS.items():
        if registry.names(kind):
            fields[key] = (choice(registry, kind), Field(description=texts[key]))
    if registry.names("trackers"):
        trackers: Any = tuple[choice(registry, "trackers"), ...]  # type: ignore[misc]
        fields["trackers"] = (trackers, Field(default=(), description=texts["trackers"]))
    plugins: dict[str, Any] = {}
    for name in registry.names("events"):
        plugin = registry.component("events", name)
        plugins[name] = (plugin | None, Field(default=None, description=summary(plugin)))
    if plugins:
        events = create_model("Events", __config__={"extra": "forbid"}, **plugins)
        fields["events"] = (events, Field(default_factory=dict, description=texts["events"]))
    model: type[BaseModel] = create_model("Parameters", __base__=Parameters, **fields)
    schema = model.model_json_schema(schema_generator=DescribedSchema)
    schema["title"] = "Parameters of a run of terakoya"
    accept_notes(schema)
    schema["properties"]["batch_size"] |= {
        "patternProperties": {
            rf"^({batch_table.ONLY_NODE}|\{batch_table.EACH_NODE}|0|[1-9][0-9]*|{batch_table.NAME.pattern})$": {
                "type": "integer",
                "minimum": 1,
            }
        },
        "additionalProperties": False,
        "minProperties": 1,
    }
    store = schema["$defs"]["TrainStore"]
    schema["$defs"]["TrainStore"] = {"anyOf": [{"type": "string"}, store]}
    return schema


def accept_notes(schema: dict[str, Any]) -> None:
    """Adds to the `schema` of a file its dialect, and the keys at the top that are not settings: `NOTES`."""
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    note = {"type": "string", "description": "For the editor and for readers; terakoya does not read it."}
    schema["properties"] = {**schema["properties"], **dict.fromkeys(NOTES, note)}


def choice(registry: Registry, kind: str) -> Any:
    """Returns a type that is any component of `kind` with its `type`."""
    models: list[Any] = []
    for offer in registry.components():
        if offer.kind == kind:
            which = Field(description=f"{offer.name}: {summary(offer.component)}")
            fields: dict[str, Any] = {"type": (Literal[offer.name], which)}
            name, text = f"{kind}_{offer.name}", offer.component.__doc__
            models.append(create_model(name, __base__=offer.component, __doc__=text, **fields))
    if len(models) < 2:  # without a plugin that has one, the command says so
        return models[0] if models else dict[str, Any]
    union: Any = Union[tuple(models)]  # noqa: UP007 - made at run time
    return Annotated[union, Field(discriminator="type")]
