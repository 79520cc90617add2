"""Models of other programs, by the class that their config.json names: what makes folders of Transformers of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from terakoya.plugins import registry


def foreign_model_problem(folder: Path) -> str:
    """Returns what the model in `folder` is, and the command that reads it, if its config.json names a class that an
    importer reads; else ""."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # whoever loads the model says what is wrong with it
    for name in names if isinstance(names, list) else ():
        for format in registry().names("importers"):
            if name in registry().component("importers", format).model_classes:
                return (
                    f"{folder}: holds a model of the class {name}, which Transformers does not have; import it first: "
                    f"terakoya import {format} {shlex.quote(str(folder))} --out MODEL"
                )
    return ""
