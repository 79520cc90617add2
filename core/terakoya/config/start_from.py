"""`start_from`: the Transformers folders with the initial weights of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from terakoya.components import Initializer
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.json_settings import short_json
from terakoya.plugins.foreign_models import foreign_model_problem
from terakoya.plugins.nested_component import NestedComponent
from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name

Folder = Annotated[Path, Field(strict=False)]
Growth = Literal["stack", "identity", "tile"]


class StartFrom(BaseModel):
    """The initial weights, instead of randomly initialised ones. In JSON the folder alone is enough: a string or an
    object of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: Folder | Annotated[dict[str, Folder], Field(min_length=1)]
    """A Transformers folder, or one for each model of the objective by the name of its export; for an export with
    sub-folders their parent folder is enough."""
    new_heads: bool = False
    """Whether weights outside the body that the folder does not have are initialised randomly; otherwise they are an
    error."""
    drop_heads: bool = False
    """Whether weights outside the body that the model does not have are ignored; otherwise they are an error."""
    new_positions: bool = False
    """Whether rotary positions may have another base or scaling than the folder's, and rows another maximum length, as
    for longer rows; otherwise they are an error."""
    vocabulary: Literal["extend", "transplant"] | None = None
    """How the model gets the vocabulary of the stores where it is another one than the folder's: "extend" for the
    folder's with more pieces, whose old rows stay as they are; "transplant" for any other, where pieces with the same
    text keep their rows. null is no other vocabulary."""
    initializer: Annotated[Initializer, NestedComponent("initializers", name_alone=True)] | None = None
    """How the rows of the other pieces are made, by its `type`, which may stand alone; null is "pieces_and_mean"."""

    grow: Growth | Annotated[tuple[Growth, ...], Field(strict=False, min_length=1)] | None = None
    """How a larger model is made of the folder's: "stack" repeats its blocks from below; "identity" does so too, but
    new blocks begin without effect; "tile" repeats widths, with as many dimensions a head. A list is several of them.
    null is a folder of the same size."""

    @model_validator(mode="after")
    def _has_one_way_to_add_blocks(self) -> Self:
        if {"stack", "identity"} <= set(self.ways_to_grow):
            raise ValueError('grow: "stack" and "identity" both add blocks; name one of them')
        return self

    @property
    def ways_to_grow(self) -> tuple[Growth, ...]:
        """`grow` as a tuple, empty for none."""
        return () if self.grow is None else (self.grow,) if isinstance(self.grow, str) else self.grow

    @model_validator(mode="after")
    def _needs_a_vocabulary(self) -> Self:
        if self.initializer is not None and self.vocabulary is None:
            raise ValueError('initializer: needs "vocabulary": "extend" or "transplant"; without it no piece is new')
        return self

    @model_validator(mode="before")
    @classmethod
    def _from_folder(cls, value: Any) -> Any:
        return value if isinstance(value, Mapping) and KEYS & value.keys() else {"folder": value}

    @field_validator("folder", mode="before")
    @classmethod
    def _is_folder(cls, value: Any) -> Any:
        folders = list(value.values()) if isinstance(value, Mapping) else [value]
        if folders and all(isinstance(folder, str | Path) and str(folder) for folder in folders):
            return value
        raise ValueError(f'expected a folder, or {{"NAME": FOLDER, ...}} for several models, got {short_json(value)}')

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The object itself, a string, or an object of strings."""
        settings = handler.resolve_ref_schema(handler(core))
        folders = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
        names = {"propertyNames": {"not": {"enum": sorted(KEYS)}}}
        return {"anyOf": [{"type": "string"}, settings, folders | names]}


KEYS = frozenset(StartFrom.model_fields)


def model_folder(folder: Path, key: str) -> Path:
    """`folder`, if it holds a model; for a name on the Hugging Face Hub, its folder in the Hub's cache on this machine.
    Raises UserError if it is not a model folder. The message begins with `key` and says what to do."""
    if (folder / "config.json").is_file():
        if problem := foreign_model_problem(folder):
            raise UserError(f"{key}: {problem}")
        return folder
    text = str(folder)
    if not folder.exists():
        cached = find_snapshot(text)
        if cached is not None:
            return model_folder(cached, key)
        if is_hub_name(text):
            raise UserError(
                f"{key}: {text} is not a folder; if it is a name on the Hugging Face Hub: a run never downloads. "
                f"Download it first, under the same name, so that the parameters stay valid: "
                f"hf download {shlex.quote(text)} --local-dir {shlex.quote(text)}"
            )
        raise UserError(
            f"{key}: {text}: expected a Transformers folder with a config.json, got "
            + describe_found(folder, "Transformers model")
        )
    if not folder.is_dir():
        raise UserError(f"{key}: {text} is a file; expected a Transformers folder with a config.json")
    subfolders = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        hint = f"it is a run or a checkpoint; export it first: terakoya export {shlex.quote(text)} --out DIR"
    elif subfolders:
        hint = "it holds " + ", ".join(f"{name}/" for name in subfolders) + "; name one of these"
    else:
        hint = "save_pretrained writes one"
    raise UserError(f"{key}: {text}: expected a Transformers folder, found no config.json in it; {hint}")
