"""Refuses an architecture that does not have the head which an objective trains."""

from __future__ import annotations

from terakoya.components import Architecture
from terakoya.errors import UserError
from terakoya.plugins import registry


def check_head(objective: str, architecture: Architecture, head: str) -> None:
    """Raises UserError if `architecture` has no `head`, with the architectures and objectives that fit."""
    if head in architecture.heads:
        return
    known = registry()
    fitting = [name for name in known.names("architectures") if head in known.component("architectures", name).heads]
    raise UserError(
        f"objective {objective}: architecture {type(architecture).__name__} has no head {head!r}, only "
        f"{', '.join(sorted(architecture.heads))}; choose an architecture.type that has it: {', '.join(fitting)}; or "
        "another objective.type"
    )
