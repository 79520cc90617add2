"""A plugin that breaks a run where the environment variables say; tests load it with `--plugin`."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from terakoya import hookimpl
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state

FAULT, _, WHERE = os.environ.get("FAULT", ":").partition(":")
RANK = int(os.environ.get("FAULT_RANK", "0"))


def is_chosen_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == RANK


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@hookimpl(specname="run_started")
def arm_late_stop_request(run: Any) -> None:
    """One process receives a stop request after step `WHERE`; the others learn of it from that one, and receive their
    own request while they save."""
    if FAULT != "late" or is_chosen_rank():
        return
    real = checkpoint_state.save_file

    def save_after_a_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    checkpoint_state.save_file = save_after_a_signal


@hookimpl
def run_started(run: Any) -> None:
    """Arms the faults inside a save: just before the action of `WHERE`, `action@count`, happens for the `count`-th
    time, the process dies or finds the disk full."""
    if FAULT not in ("save", "full") or not is_chosen_rank():
        return
    name, _, count = WHERE.partition("@")
    owner, attribute = {
        "write": (checkpoint_state, "save_file"),
        "fsync": (checkpoint_state.os, "fsync"),
        "manifest": (checkpoint.json, "dumps"),
        "rename": (checkpoint.Path, "rename"),
        "prune": (checkpoint.shutil, "rmtree"),
    }[name]
    real = getattr(owner, attribute)
    calls = [0]

    def fail_at_count(*arguments: Any, **options: Any) -> Any:
        if name != "manifest" or (arguments and isinstance(arguments[0], dict) and "files" in arguments[0]):
            calls[0] += 1
            if calls[0] == int(count):
                if FAULT == "full":
                    raise OSError(28, "No space left on device")
                die()
        return real(*arguments, **options)

    setattr(owner, attribute, fail_at_count)


@hookimpl
def checkpoint_saved(run: Any, folder: Any) -> None:
    """Fails after the checkpoint of step `WHERE`."""
    if FAULT == "saved" and is_chosen_rank() and run.step == int(WHERE):
        raise RuntimeError("the plugin gave up")


@hookimpl
def step_finished(run: Any, report: Any) -> None:
    """Fails after step `WHERE`."""
    if not is_chosen_rank() or not WHERE.isdigit() or run.step != int(WHERE):
        return
    if FAULT == "kill":
        die()
    if FAULT in ("term", "late"):
        os.kill(os.getpid(), signal.SIGTERM)
    if FAULT == "raise":
        raise RuntimeError("the plugin gave up")
    if FAULT == "nan":
        with torch.no_grad():
            next(run.module.parameters()).fill_(float("nan"))
