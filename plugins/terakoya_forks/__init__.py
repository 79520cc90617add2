"""What this family adds: `terakoya fork`, which begins a run at a checkpoint of another one, and `terakoya average`."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_forks.commands import average, fork

    example = "terakoya fork work/run@8000 --out work/decay --set max_steps=9000 --set schedule.decay_steps=1000"
    averaged = "terakoya average work/run --last 5 --out work/averaged"
    return {
        "fork": Command(fork.command, example, after="launch"),
        "average": Command(average.command, averaged, after="export"),
    }
