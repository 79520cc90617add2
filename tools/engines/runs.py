"""Runs of `terakoya` in processes of their own, forked from one that has imported what they need."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

SECONDS = 300.0
"""A run that takes longer hangs."""
MODELS = ("bert", "electra", "gpt2", "gptj", "llama", "qwen3")


class RunError(Exception):
    """A run that did not end as it should; says what it printed last."""


def train(
    settings: Mapping[str, Any],
    out: Path,
    *,
    processes: int,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    killed: bool = False,
) -> None:
    """Runs `terakoya train` with `settings` into `out`, in as many `processes`.

    Raises:
        RunError: a process did not end well or, where one is to be `killed`, all did.
    """
    file = out.with_name(f"{out.name}.json")
    file.write_text(json.dumps(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [*(text for plugin in plugins for text in ("--plugin", str(plugin))), "train", str(file)]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(processes):
        mine = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} if processes > 1 else {}
        said = out.with_name(f"{out.name}.{rank}.txt")
        given = ([*arguments, "--out", str(out)], {**(environment or {}), **mine}, said)
        process = _forkserver().Process(target=_command_line, args=given)
        process.start()
        started.append((process, said))
    for process, _ in started:
        process.join(SECONDS)
    codes = [process.exitcode for process, _ in started]
    for process, _ in started:
        if process.is_alive():
            process.kill()
    if any(codes) != killed or None in codes:
        raise RunError(f"exit codes {codes}: {_last_words([said for _, said in started])}")


@cache
def _forkserver() -> ForkServerContext:
    """Starts processes from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    deepspeed = ["deepspeed"] if importlib.util.find_spec("deepspeed") else []
    modules = [f"transformers.models.{name}.modeling_{name}" for name in MODELS]
    context.set_forkserver_preload(
        ["terakoya.training.setup", "terakoya.commands.main", "accelerate", *modules, *deepspeed]
    )
    return context


def _command_line(arguments: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
    """`terakoya ARGUMENTS` in this forked process, with what it prints in the file `said`."""
    from terakoya.commands.main import main

    os.environ.update(environment)
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    main(arguments)


def _last_words(files: Sequence[Path]) -> str:
    """The last line of an error in `files`, else the last line."""
    lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["nothing was printed"])[-1]
