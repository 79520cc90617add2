"""The family `clusters`: runs on PBS, Grid Engine and SageMaker, and runs that move. README.md lists what it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from terakoya.components import Launcher


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_clusters.commands import move

    example = "terakoya move work/run hosts:a01:8,a02:8 --out s3://bucket/run"
    return {"move": Command(move.command, example, after="launch", passes_options=True)}


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Registers `estimate --gpus` and `prepare --engine`."""
    from terakoya_clusters.commands import datatrove, layouts

    return {"estimate": layouts.estimate, "prepare": datatrove.prepare}


@hookimpl
def check_parts(parts: Path) -> None:
    """Refuses a folder while Slurm's jobs of datatrove are at work on it."""
    from terakoya_clusters.preparation.submitted_jobs import check_no_jobs

    check_no_jobs(parts)


@hookimpl
def register_settings() -> Mapping[str, type[BaseModel]]:
    from terakoya_clusters.preparation.datatrove_settings import EXECUTORS

    return {f"prepare --engine datatrove --executor {name}": model for name, model in EXECUTORS.items()}


@hookimpl
def register_launchers() -> Mapping[str, type[Launcher]]:
    from terakoya_clusters.launchers.grid_engine import GridEngine
    from terakoya_clusters.launchers.pbs import Pbs
    from terakoya_clusters.launchers.sagemaker.launcher import SageMaker

    return {"pbs": Pbs, "grid_engine": GridEngine, "sagemaker": SageMaker}
