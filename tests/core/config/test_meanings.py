"""Every setting has a meaning, from the docstring below it or from its type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from terakoya.components import Component
from terakoya.config.fields import ParameterFields
from terakoya.config.meanings import DescribedSchema, Setting, default_text, descriptions, settings_of
from terakoya.config.start_from import StartFrom
from terakoya.plugins import registry
from terakoya_pipeline.settings import Pipeline

MEASURED = re.compile(r"(^|_)(steps?|tokens|seconds|minutes|bytes|gb|epochs)$")
"""The ends of names whose values have a unit, if they are numbers."""


def models() -> Iterator[type[BaseModel]]:
    """Every model of settings that users write: of the parameters, pipelines, cleaning, commands and components."""
    waiting: list[type[BaseModel]] = [ParameterFields, Pipeline, *registry().settings.values()]
    waiting += [each.component for each in registry().components() if each.distribution == "terakoya"]
    seen: set[type[BaseModel]] = set()
    while waiting:
        model = waiting.pop()
        if model in seen or model in Component.__subclasses__():
            continue
        seen.add(model)
        yield model
        for field in model.model_fields.values():
            waiting += _models_in(field.annotation)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in getattr(annotation, "__args__", ()) for model in _models_in(each)]


def test_every_setting_has_a_meaning_in_a_sentence() -> None:
    found = {model.__name__: settings_of(model) for model in models()}
    assert len(found) > 60
    without = [f"{name}.{each.name}" for name, settings in found.items() for each in settings if not each.meaning]
    assert not without, f"write a docstring below these fields: {without}"
    broken = [
        f"{name}.{each.name}: {each.meaning}"
        for name, settings in found.items()
        for each in settings
        if not each.meaning.endswith((".", "...", ")"))
        or "Unit:" in each.meaning
        or not (each.meaning[0].isupper() or each.meaning[0] in "`[")
    ]
    assert not broken, f"expected sentences: {broken}"


def test_keys_of_a_model_with_a_shorter_form_have_their_types() -> None:
    kinds = {each.name: each.kind for each in settings_of(StartFrom)}
    assert kinds["new_heads"] == "true or false" and kinds["vocabulary"] == '"extend" or "transplant" or null'
    assert "any value" not in kinds.values()


def test_a_number_of_steps_tokens_or_seconds_has_its_unit() -> None:
    measured = [
        (model, each)
        for model in models()
        for each in settings_of(model)
        if MEASURED.search(each.name) and re.match("(integer|number)", each.kind)
    ]
    assert len(measured) > 30
    without = [f"{model.__name__}.{each.name}" for model, each in measured if not each.unit]
    assert not without, f'end their docstrings with "Unit: seconds.": {without}'


Width = Annotated[int, Field(description="The width. Unit: dimensions.", ge=1)]


class Above(BaseModel):
    """Settings of which a class below has more."""

    seconds: float | None = None
    """How long it waits; null waits
    for ever. Unit: seconds. Since: 0.2."""
    width: Width = 4
    silent: bool = False


class Below(Above):
    """More settings."""

    width: Width = 8
    mode: str = "a"
    """The mode, such as "b"."""
    above: Above = Above()
    """Its own settings."""


def test_meaning_unit_and_version_come_from_the_docstring_or_the_type() -> None:
    assert settings_of(Below) == [
        Setting("seconds", "number or null", "null", "How long it waits; null waits for ever.", "seconds", "0.2"),
        Setting("width", "integer at least 1", "8", "The width.", "dimensions", "0.1"),
        Setting("silent", "true or false", "false", "", "", "0.1"),
        Setting("mode", "text", '"a"', 'The mode, such as "b".', "", "0.1"),
        Setting("above", "object", "{...}", "Its own settings.", "", "0.1"),
    ]
    assert "silent" not in descriptions(Below)


def test_the_schema_has_the_descriptions_also_of_inner_objects() -> None:
    schema = Below.model_json_schema(schema_generator=DescribedSchema)
    assert schema["properties"]["mode"]["description"] == 'The mode, such as "b".'
    assert schema["$defs"]["Above"]["properties"]["seconds"]["description"].startswith("How long it waits; null waits")
    assert schema["description"] == "More settings."


@pytest.mark.parametrize(("value", "text"), [(None, "null"), ((1, "x"), '[1, "x"]'), (Above(), "{...}")])
def test_defaults_are_json(value: object, text: str) -> None:
    assert default_text(value) == text
