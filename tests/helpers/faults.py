"""A plugin that breaks a run where the environment variables say; tests load it with `--plugin`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import torch

from terakoya import hookimpl
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya_watch import heartbeat

FAULT, _, WHERE = os.environ.get("FAULT", ":").partition(":")
RANK = int(os.environ.get("FAULT_RANK", "0"))
SEEN: list[int] = []

if multiprocessing.parent_process() is not None:  # a forked rank: one whose peer was killed waits ten beats for news
    heartbeat.BEAT_SECONDS = 0.3  # test_hangs waits them in full


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
    time, the process dies or finds the disk full; from then on where `WHERE` ends with "-"."""
    if FAULT not in ("save", "full") or not is_chosen_rank():
        return
    name, _, count = WHERE.partition("@")
    owner, attribute = {
        "write": (checkpoint_state, "save_file"),
        "fsync": (os, "fsync"),
        "manifest": (checkpoint.json, "dumps"),
        "rename": (checkpoint.Path, "rename"),
        "prune": (checkpoint.shutil, "rmtree"),
    }[name]
    real = getattr(owner, attribute)
    calls = [0]

    def fail_at_count(*arguments: Any, **options: Any) -> Any:
        if name != "manifest" or (arguments and isinstance(arguments[0], dict) and "files" in arguments[0]):
            calls[0] += 1
            if calls[0] == int(count.rstrip("-")) or (count.endswith("-") and calls[0] > int(count[:-1])):
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


@hookimpl(specname="step_finished")
def die_after_step(run: Any) -> None:
    """Dies after step `FAULT_KILL`, or with `STEP@2` when it has ended for the second time, besides the fault of
    `FAULT`."""
    step, _, times = os.environ.get("FAULT_KILL", "").partition("@")
    if step == str(run.step):
        SEEN.append(run.step)
        if len(SEEN) == int(times or 1):
            die()


@hookimpl(specname="run_started")
def spoil_losses(run: Any) -> None:
    """Spoils the losses of the steps of `WHERE` (`7` or `7-9`) on one rank, or with `FAULT_RANK` -1 on all."""
    if FAULT == "spoil" and (RANK < 0 or is_chosen_rank()):
        first, _, last = WHERE.partition("-")
        factor, added = (float(os.environ.get(name, default)) for name, default in (("FACTOR", "1"), ("ADDED", "0")))
        spoil(run, range(int(first), int(last or first) + 1), factor, added)


def spoil(run: Any, steps: range, factor: float = 1.0, added: float = 0.0) -> None:
    """Makes the losses of `steps`, counted from 1, `factor` x loss + `added`; what is added has no gradient. In a
    pipeline, this spoils the stages of this process."""
    names = [name for name, term in run.objective.terms().items() if term.weight is not None]
    for module in [run.module, *(each.root for each in run.module.children() if hasattr(each, "root"))]:

        def spoiled(*arguments: Any, forward: Any = module.forward, **options: Any) -> Any:
            sums = forward(*arguments, **options)
            if run.module.training and run.step + 1 in steps and isinstance(sums, dict):
                return {**sums, **{name: sums[name] * factor + added for name in names}}
            return sums

        module.forward = spoiled
