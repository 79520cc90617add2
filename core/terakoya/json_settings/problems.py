"""What is wrong with settings, a line for each of pydantic's errors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from terakoya.errors import nearest
from terakoya.folder_kinds import nearest_paths
from terakoya.json_settings.short_json import short_json


def explain(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str = "",
    *,
    explain_unknown: Callable[[str], str] = lambda path: "",
) -> list[str]:
    """Returns one line for each problem: key path, expected value, given value, the nearest known name.

    `explain_unknown` returns the end of the line for the key path of an unknown key, or "": then the nearest known
    keys are named, or all known keys, once for each object.
    """
    lines = []
    listed: set[str] = set()
    for problem in error.errors(include_url=False):
        keys = [str(key) for key in problem["loc"]]
        path = ".".join([prefix, *keys] if prefix else keys)
        kind, got = problem["type"], problem["input"]
        if kind == "extra_forbidden":
            known = field_names(_model_at(model, keys[:-1]))
            advice = explain_unknown(path) or _nearest_key(keys[-1], known)
            text = "unknown key" + ("" if advice in listed else advice)
            if advice.startswith("; known: "):
                listed.add(advice)
        elif kind == "missing":
            text = "missing"
        elif kind in ("value_error", "assertion_error"):
            text = str(problem["ctx"]["error"])
        else:
            expected = problem["msg"].replace("Input should be a valid list or tuple", "expected a list")
            expected = expected.replace("Input should be a valid integer", "expected an integer")
            expected = expected.replace("Input should be a valid boolean", "expected true or false")
            expected = expected.replace("a valid dictionary", "an object")
            expected = expected.replace("a valid tuple", "a list").replace("a valid array", "a list")
            expected = expected.replace("Input should be ", "expected ").replace("a valid ", "a ").replace("'", '"')
            expected = re.sub(r" or instance of \w+", "", expected)
            expected = re.sub(r", unable to parse string as an? \w+$", "", expected)
            text = f"{expected}, got {short_json(got)}"
            if expected == "expected a list" and isinstance(got, str):
                bare = re.fullmatch(r"\[(.+)\]", got)  # whose quotes the shell has removed
                words = [word.strip(" '\"") for word in bare[1].split(",")] if bare else [got]
                words = [next(iter(nearest_paths(Path(word))), word) for word in words]
                value = json.dumps(words, ensure_ascii=False)
                instead = f"write {shlex.quote(f'{path}={value}') if bare else value}"
                text += f"; {instead}"
        line = f"{path}: {text}" if path else text
        if line not in lines:
            lines.append(line)
    return lines


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """Returns `nearest`; if no key is near, the keys that contain the words of `key`: `min_characters` for `min`."""
    text = nearest(key, known)
    parts = set(key.lower().split("_"))
    longer = [f'"{name}"' for name in known if parts <= set(name.split("_"))]
    if "did you mean" not in text and 1 <= len(longer) <= 3:
        return f"; did you mean {' or '.join(longer)}?"
    return text


def field_names(model: type[BaseModel] | None) -> list[str]:
    """Returns the keys that `model` accepts in JSON."""
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    """Returns the model that describes the object at `keys` below `model`, None if no model does."""
    current: type[BaseModel] | None = model
    named = False
    for key in keys:
        if current is None:
            return None
        if key.isdigit() or named:
            named = False
            continue  # an item of a list or an object: the key of the list or object has selected its model already
        field = current.model_fields.get(key)
        current = next((model for model, _ in models_in(field.annotation)), None) if field else None
        named = field is not None and get_origin(field.annotation) is dict
    return current


def models_in(annotation: Any, ending: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yields each model in a field's type, with what its key path has after the field's name: `.N`, `.NAME`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ending
    more = ".N" if get_origin(annotation) in (tuple, list) else ".NAME" if get_origin(annotation) is dict else ""
    for argument in get_args(annotation):
        yield from models_in(argument, ending + more)
