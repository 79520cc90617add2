"""Runs `terakoya train` in new processes, forked from a process that has imported the libraries."""

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
"""A run that takes longer is taken to hang."""
MODELS = ("bert", "electra", "gpt2", "gptj", "llama", "qwen3")


class RunError(Exception):
    """A run ended in another way than expected; the message quotes its output."""


def train(
    settings: Mapping[str, Any],
    out: Path,
    *,
    processes: int,
    plugins: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    killed: bool = False,
) -> None:
    """Runs `terakoya train` with `settings` into `out`, in `processes` processes.

    Raises:
        RunError: a process failed or, with `killed`, no process failed.
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
        variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} if processes > 1 else {}
        output = out.with_name(f"{out.name}.{rank}.txt")
        process_arguments = ([*arguments, "--out", str(out)], {**(environment or {}), **variables}, output)
        process = _forkserver().Process(target=_command_line, args=process_arguments)
        process.start()
        started.append((process, output))
    for process, _ in started:
        process.join(SECONDS)
    codes = [process.exitcode for process, _ in started]
    for process, _ in started:
        if process.is_alive():
            process.kill()
    if any(codes) != killed or None in codes:
        raise RunError(f"exit codes {codes}: {_error_line([output for _, output in started])}")


@cache
def _forkserver() -> ForkServerContext:
    """Returns a context that forks processes from one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    deepspeed = ["deepspeed"] if importlib.util.find_spec("deepspeed") else []
    modules = [f"transformers.models.{name}.modeling_{name}" for name in MODELS]
    context.set_forkserver_preload(
        ["terakoya.training.setup", "terakoya.commands.main", "accelerate", *modules, *deepspeed]
    )
    return context


def _command_line(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Runs `terakoya ARGUMENTS` in this forked process, with its output in the file `output`."""
    from terakoya.commands.main import main

    os.environ.update(environment)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    main(arguments)


def _error_line(files: Sequence[Path]) -> str:
    """The last line in `files` that contains an error, else the last line."""
    lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["nothing was printed"])[-1]
