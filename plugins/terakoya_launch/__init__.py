"""The family `launch`: runs that start beyond this terminal, on hosts and on Slurm. README.md lists what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import EventPlugin, Launcher


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_launch.commands import launch

    example = "terakoya launch slurm bert_ja --out work/run --time 24:00:00"
    return {"launch": Command(launch.command, example, after="train", passes_options=True)}


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    from terakoya_launch.launchers.hosts.launcher import Hosts
    from terakoya_launch.launchers.local import Local
    from terakoya_launch.launchers.slurm.launcher import Slurm

    return {"hosts": Hosts, "local": Local, "slurm": Slurm}


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    from terakoya_launch.accelerate_requests import AccelerateRequests

    return {"accelerate_requests": AccelerateRequests}
