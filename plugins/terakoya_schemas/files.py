"""The JSON Schemas of all settings files besides a run's, which is that of `parameters.py`: for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, create_model

from terakoya.config.meanings import DescribedSchema, descriptions, summary
from terakoya.errors import UserError, nearest
from terakoya.plugins import Registry
from terakoya_pipeline.settings import CorpusEntry, Pipeline
from terakoya_schemas import parameters as parameter_schema

PARAMETERS, PIPELINE, CLEANING, TOKENIZER = "parameters", "pipeline", "cleaning", "tokenizer"


def schema_names(registry: Registry) -> list[str]:
    """Returns the names that `schema_of` knows: the kinds of files, and every launcher, whose settings file has no
    `type`."""
    return [PARAMETERS, PIPELINE, CLEANING, TOKENIZER, *registry.names("launchers")]


def schema_of(name: str, registry: Registry) -> dict[str, Any]:
    """Returns the JSON Schema of a kind of file. Raises UserError if `name` is none of `schema_names`."""
    if name == PARAMETERS:
        return parameter_schema.json_schema(registry)
    if name == PIPELINE:
        return _pipeline_schema(registry)
    if name == CLEANING:
        return _cleaning_schema(registry)
    if name == TOKENIZER:
        return _tokenizer_schema(registry)
    if name not in registry.names("launchers"):
        raise UserError(f"{name}: there is no such settings file{nearest(name, schema_names(registry))}")
    schema = registry.component("launchers", name).model_json_schema(schema_generator=DescribedSchema)
    schema["title"] = f"Settings of terakoya launch {name}"
    schema.pop("required", None)  # each may also be an option of the command
    parameter_schema.accept_notes(schema)
    return schema


def _pipeline_schema(registry: Registry) -> dict[str, Any]:
    texts, of_corpora = descriptions(Pipeline), descriptions(CorpusEntry)
    steps: Any = tuple[parameter_schema.choice(registry, "cleaning_steps"), ...]  # type: ignore[misc]
    own_steps: Any = (steps | None, Field(default=None, description=of_corpora["clean"]))
    entry: Any = create_model("Corpus", __base__=CorpusEntry, __doc__=CorpusEntry.__doc__, clean=own_steps)
    fields: dict[str, Any] = {
        "clean": (steps, Field(default=(), description=texts["clean"])),
        "corpora": (dict[str, entry], Field(default={}, description=texts["corpora"])),
        "tokenizer": (
            parameter_schema.choice(registry, "tokenizers") | None,
            Field(default=None, description=texts["tokenizer"]),
        ),
        "words": (
            str | parameter_schema.choice(registry, "word_finders") | None,
            Field(default=None, description=texts["words"]),
        ),
    }
    model: type[BaseModel] = create_model("Pipeline", __base__=Pipeline, **fields)
    schema = model.model_json_schema(schema_generator=DescribedSchema)
    schema["title"] = "A pipeline of terakoya run"
    for owner in (schema, schema["$defs"]["Corpus"]):
        for key in ("corpus", "validation_corpus"):
            listed = owner["properties"][key]
            about = {name: listed.pop(name) for name in ("title", "description", "default") if name in listed}
            owner["properties"][key] = {**about, "anyOf": [{"type": "string"}, listed]}
    parameter_schema.accept_notes(schema)
    run = parameter_schema.json_schema(registry)
    run["$defs"]["Data"].pop("required")  # its stores are the pipeline's
    inner = {"type": "object", "properties": run["properties"], "additionalProperties": False}
    schema["properties"]["parameters"]["anyOf"] = [{"type": "string"}, inner]
    schema["$defs"] |= run["$defs"]
    return schema


def _cleaning_schema(registry: Registry) -> dict[str, Any]:
    steps: Any = list[parameter_schema.choice(registry, "cleaning_steps")]  # type: ignore[misc]
    schema = TypeAdapter(steps).json_schema(schema_generator=DescribedSchema)
    definitions = schema.pop("$defs")
    text = "The cleaning steps, in order."
    in_object = {"type": "object", "properties": {"clean": {**schema, "description": text}}, "required": ["clean"]}
    parameter_schema.accept_notes(in_object)
    dialect = in_object.pop("$schema")
    result = {"title": "Cleaning steps of terakoya", "description": text, "$schema": dialect, "$defs": definitions}
    return {**result, "anyOf": [schema, {**in_object, "additionalProperties": False}]}


def _tokenizer_schema(registry: Registry) -> dict[str, Any]:
    """Returns the schema of --settings of `terakoya tokenizer train`: a kind with its settings, and where to write."""
    more = {
        "input": "The corpus: one file, or a list of them.",
        "output_dir": "The folder in which the tokenizer's folder is made.",
        "model_prefix": "The name of the tokenizer's folder.",
    }
    kinds = {"type": {"enum": registry.names("tokenizers"), "description": "Which of the tokenizers it is."}}
    notes = {key: {"description": text} for key, text in more.items()}
    definitions: dict[str, Any] = {}
    choices = []
    for name in registry.names("tokenizers"):
        component = registry.component("tokenizers", name)
        schema = component.model_json_schema(schema_generator=DescribedSchema)
        definitions |= schema.pop("$defs", {})
        schema.pop("required", None)
        schema["properties"] |= {**notes, "type": {"const": name, "description": f"{name}: {summary(component)}"}}
        choices.append(schema)
    result: dict[str, Any] = {"title": "Settings of terakoya tokenizer train", "type": "object", "properties": kinds}
    parameter_schema.accept_notes(result)
    for each in choices:
        each["properties"] |= {key: True for key in result["properties"] if key not in each["properties"]}
    return {**result, "$defs": definitions, "anyOf": choices}
