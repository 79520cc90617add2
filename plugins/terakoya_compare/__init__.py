"""What this family adds: `compare`, which says how sure a difference between models or recipes is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import ModuleTransform


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_compare.commands import compare

    example = "terakoya compare work/run-a work/run-b --validation work/store.val"
    return {"compare": Command(compare.command, example, after="evaluate")}


@hookimpl
def register_module_transforms() -> Mapping[str, ModuleTransform]:
    """Adds how a run begins with the weights of the recipe that it is compared with."""
    from terakoya_compare.shared_start import TRANSFORM

    return {"shared_start": TRANSFORM}
