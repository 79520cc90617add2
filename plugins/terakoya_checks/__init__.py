"""What this family adds: `doctor`, whether this machine and installation can train, and `verify`, whether a run, a
checkpoint, a store or a model is sound."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_checks.commands import doctor, verify

    return {
        "verify": Command(verify.command, "terakoya verify work/run", after="report"),
        "store verify": Command(verify.store_command, "terakoya store verify work/store", after="store count"),
        "doctor": Command(doctor.command, "terakoya doctor", after="parameters"),
    }
