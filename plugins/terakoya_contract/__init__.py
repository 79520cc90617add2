"""The family `contract`: what every component of a kind must do, as checks, and the start of a plugin of each kind.

    from terakoya_contract import problems

    problems(Path("my_plugin.py"))  # [] if every check passed, else sentences that say what is missing

The project's tests check the bundled components in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya_contract.checking import check_component as check_component
    from terakoya_contract.checking import check_plugin as check_plugin
    from terakoya_contract.checking import problems as problems


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_contract.commands import check, new

    return {
        "plugins new": Command(new.command, "terakoya plugins new my_schedule --kind schedule", after="plugins show"),
        "plugins check": Command(check.command, "terakoya plugins check my_schedule.py", after="plugins new"),
    }


def __getattr__(name: str) -> Any:
    if name not in ("check_component", "check_plugin", "problems"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from terakoya_contract import checking

    return getattr(checking, name)
