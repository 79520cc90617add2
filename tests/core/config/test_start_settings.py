"""`start_from` in the parameter JSON: a folder, or one for each model, and which heads may differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya_schemas.parameters import json_schema

BASE: dict[str, Any] = {
    "data": {"train": ["work/a"], "sequence_length": 128},
    "architecture": {"type": "bert"},
    "objective": {"type": "masked_lm"},
    "optimizer": {"type": "adamw"},
    "schedule": {"type": "linear"},
    "batch_size": {"-1": 256},
    "max_steps": 100,
}
PAIR = {"generator": "a/g", "discriminator": "a/d"}


def read(value: Any) -> Any:
    return Parameters.from_dict({**BASE, "start_from": value}, source="t").start_from


@pytest.mark.parametrize(
    ("value", "folder", "new_heads"),
    [
        ("some/model", Path("some/model"), False),
        (PAIR, {"generator": Path("a/g"), "discriminator": Path("a/d")}, False),
        ({"folder": "m", "new_heads": True}, Path("m"), True),
        ({"folder": PAIR, "drop_heads": True}, {"generator": Path("a/g"), "discriminator": Path("a/d")}, False),
    ],
)
def test_every_form_is_read(value: Any, folder: Any, new_heads: bool) -> None:
    given = read(value)
    assert (given.folder, given.new_heads) == (folder, new_heads)
    parameters = Parameters.from_dict({**BASE, "start_from": value}, source="t")
    dumped = json.loads(json.dumps(parameters.dump()))
    assert Parameters.from_dict(dumped, source="t") == parameters


def test_the_default_is_no_folder_and_no_frozen_layers() -> None:
    parameters = Parameters.from_dict(BASE, source="t")
    assert parameters.start_from is None and parameters.frozen_layers == -1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "start_from.folder: expected a folder, or {\"NAME\": FOLDER, ...} for several models, got 3"),
        ({}, "start_from.folder: expected a folder"),
        ("", "start_from.folder: expected a folder"),
        ({"generator": 3}, 'start_from.folder: expected a folder, or {"NAME": FOLDER, ...} for several models, got'),
        ({"folder": "m", "new_head": True}, 'start_from.new_head: unknown key; did you mean "new_heads"'),
        ({"new_heads": True}, "start_from.folder: missing"),
        ({"folder": "m", "new_heads": "yes"}, 'start_from.new_heads: expected true or false, got "yes"'),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused(value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(value)
    assert str(caught.value).startswith(f"t: {expected}")


def test_the_schema_has_every_form() -> None:
    schema = json_schema(registry())
    text, settings, folders = schema["$defs"]["StartFrom"]["anyOf"]
    assert text == {"type": "string"}
    keys = {"folder", "new_heads", "drop_heads", "vocabulary", "initializer", "grow", "new_positions"}
    assert set(settings["properties"]) == keys and settings["required"] == ["folder"]
    assert settings["additionalProperties"] is False
    assert folders["additionalProperties"] == {"type": "string"}
    assert folders["propertyNames"] == {"not": {"enum": sorted(keys)}}
    frozen = schema["properties"]["frozen_layers"]
    assert frozen.pop("description").startswith("The number of lowest layers whose weights stay as they are")
    assert frozen == {
        "default": -1, "minimum": -1, "title": "Frozen Layers", "type": "integer",
    }  # fmt: skip
