"""What this family adds: `terakoya fork`, which begins a new run at a checkpoint of another one."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_forks.commands import fork

    example = "terakoya fork work/run@8000 --out work/decay --set max_steps=9000 --set schedule.decay_steps=1000"
    return {"fork": Command(fork.command, example, after="launch")}
