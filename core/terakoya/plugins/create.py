"""Creating a component by its name, with settings from a command line or a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from terakoya.errors import UserError
from terakoya.json_settings import explain
from terakoya.plugins import registry


def create_component(kind: str, name: str, settings: Mapping[str, Any], *, where: str) -> Any:
    """Returns the component `name` of `kind` (a key of `components.KINDS`) with `settings`: an instance of its class.
    Raises UserError if the component is not installed, or does not accept the settings; one line for each problem,
    after `where`."""
    component = registry().component(kind, name)
    try:
        return component.model_validate_json(json.dumps(dict(settings), default=str))
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in explain(error, component))) from None
