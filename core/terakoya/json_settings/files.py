"""Settings files: JSON with comments or YAML, by name and by content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import missing_file
from terakoya.json_settings.json_text import parse_json, strict_json
from terakoya.json_settings.short_json import short_json
from terakoya.json_settings.yaml_text import is_yaml_name, looks_like_yaml, parse_yaml

NOTES = ("$schema", "_comment")
"""Keys at the top of a file that are for its editor and its readers: they are accepted and not read."""


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the object in the settings file `path`, without `NOTES`: YAML if its name ends in .yaml or .yml, else
    JSON, which may have comments (`//`, `/* */`) and a comma after the last entry. Raises UserError if there is no such
    file, it is neither JSON nor YAML, a key is given twice, a number is NaN or Infinity, or the top level is not an
    object."""
    return _object(path, read_value(path))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the JSON file `path`, which a program wrote, without `NOTES`: no comments, no YAML. Raises
    UserError as `read_settings` does."""
    return _object(path, parse_json(path, _text_of(path)))


def read_value(path: Path) -> Any:
    """Returns the value in the settings file `path`, of any type. Raises UserError as `read_settings` does."""
    text = _text_of(path)
    if is_yaml_name(path) or (path.suffix.lower() != ".json" and looks_like_yaml(text)):
        return parse_yaml(path, text)
    return parse_json(path, text, strict_json(text))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Notepad's UTF-8 may begin with a byte order mark
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"{path}: {missing_file(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: {error}; save it as UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _object(path: Path, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        kind = "keys with values" if is_yaml_name(path) else "a JSON object"
        raise UserError(f"{path}: expected {kind}, got {short_json(raw)}")
    return without_notes(raw)


def without_notes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object `raw` without `NOTES`."""
    return {key: value for key, value in raw.items() if key not in NOTES}
