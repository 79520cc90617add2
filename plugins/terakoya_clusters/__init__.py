"""The family `clusters`: runs on PBS, Grid Engine and SageMaker, and runs that move. README.md lists what it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import Launcher


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Registers `move`."""
    from terakoya_clusters.commands import move

    example = "terakoya move work/run hosts:a01:8,a02:8 --out s3://bucket/run"
    return {"move": Command(move.command, example, after="launch", passes_options=True)}


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Registers `estimate --gpus`."""
    from terakoya_clusters.commands import layouts

    return {"estimate": layouts.estimate}


@hookimpl
def register_launchers() -> Mapping[str, type[Launcher]]:
    """Registers `pbs`, `grid_engine` and `sagemaker`."""
    from terakoya_clusters.launchers.grid_engine.launcher import GridEngine
    from terakoya_clusters.launchers.pbs.launcher import Pbs
    from terakoya_clusters.launchers.sagemaker.launcher import SageMaker

    return {"pbs": Pbs, "grid_engine": GridEngine, "sagemaker": SageMaker}
