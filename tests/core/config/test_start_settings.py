"""`start_from` in the parameter JSON: a folder, or one for each model, and what may differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.config.schema import json_schema
from terakoya.errors import UserError
from terakoya.plugins import registry

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
def test_every_way_to_write_it(value: Any, folder: Any, new_heads: bool) -> None:
    given = read(value)
    assert (given.folder, given.new_heads) == (folder, new_heads)
    parameters = Parameters.from_dict({**BASE, "start_from": value}, source="t")
    dumped = json.loads(json.dumps(parameters.dump()))
    assert Parameters.from_dict(dumped, source="t") == parameters


def test_without_it_nothing_is_read_and_nothing_frozen() -> None:
    parameters = Parameters.from_dict(BASE, source="t")
    assert parameters.start_from is None and parameters.frozen_layers == -1


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_what_it_cannot_be(value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(value)
    assert str(caught.value).startswith(f"t: {said}")


def test_the_schema_names_every_way_to_write_it() -> None:
    schema = json_schema(registry())
    text, settings, folders = schema["$defs"]["StartFrom"]["anyOf"]
    assert text == {"type": "string"}
    assert set(settings["properties"]) == {"folder", "new_heads", "drop_heads"} and settings["required"] == ["folder"]
    assert settings["additionalProperties"] is False
    assert folders["additionalProperties"] == {"type": "string"}
    assert folders["propertyNames"] == {"not": {"enum": ["drop_heads", "folder", "new_heads"]}}
    assert schema["properties"]["frozen_layers"] == {
        "default": -1, "minimum": -1, "title": "Frozen Layers", "type": "integer",
    }  # fmt: skip
