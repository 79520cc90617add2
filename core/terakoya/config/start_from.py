"""`start_from`: which Transformers folders a run's weights come from, and how a folder is found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from terakoya.errors import UserError
from terakoya.json_settings import shown
from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name

Folder = Annotated[Path, Field(strict=False)]


class StartFrom(BaseModel):
    """Weights to begin with, in place of drawn ones. JSON may give the folder alone: a string or an object of strings.

    Attributes:
        folder: a Transformers folder, or one for each model of the objective by the name it is exported under; for an
            export with sub-folders the folder above them is enough.
        new_heads: draw what the folder lacks outside the body; else that is refused.
        drop_heads: leave out what the folder has beyond the model, outside the body; else that is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: Folder | Annotated[dict[str, Folder], Field(min_length=1)]
    new_heads: bool = False
    drop_heads: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_folder(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return value if KEYS & value.keys() else {"folder": value}
        return {"folder": value}

    @field_validator("folder", mode="before")
    @classmethod
    def _is_folder(cls, value: Any) -> Any:
        folders = list(value.values()) if isinstance(value, Mapping) else [value]
        if folders and all(isinstance(folder, str | Path) and str(folder) for folder in folders):
            return value
        raise ValueError(f'expected a folder, or {{"NAME": FOLDER, ...}} for several models, got {shown(value)}')

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The object itself, a string, or an object of strings."""
        settings = handler.resolve_ref_schema(handler(core))
        folders = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
        names = {"propertyNames": {"not": {"enum": sorted(KEYS)}}}
        return {"anyOf": [{"type": "string"}, settings, folders | names]}


KEYS = frozenset(StartFrom.model_fields)


def model_folder(folder: Path, key: str) -> Path:
    """`folder`, found to hold a model; or, where it is a name on the Hugging Face Hub whose files lie in the Hub's
    cache on this machine, their folder.

    Raises:
        UserError: beginning with `key`: it is none, and what to do.
    """
    if (folder / "config.json").is_file():
        return folder
    text = str(folder)
    if not folder.exists():
        cached = find_snapshot(text)
        if cached is not None:
            return model_folder(cached, key)
        if is_hub_name(text):
            raise UserError(
                f"{key}: {text} is no folder here; if it is a name on the Hugging Face Hub: a run never downloads. "
                f"Fetch it first, with the same name the parameters stay as they are: "
                f"hf download {text} --local-dir {text}"
            )
        raise UserError(f"{key}: {text}: no such folder; expected a Transformers folder with a config.json")
    if not folder.is_dir():
        raise UserError(f"{key}: {text} is a file; expected a Transformers folder with a config.json")
    found = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        hint = f"it is a run or a checkpoint; make a folder of it with: terakoya export {text} --out DIR"
    elif found:
        hint = "it holds " + ", ".join(f"{name}/" for name in found) + "; name one of these"
    else:
        hint = "save_pretrained writes one"
    raise UserError(f"{key}: {text}: expected a Transformers folder, found no config.json in it; {hint}")
