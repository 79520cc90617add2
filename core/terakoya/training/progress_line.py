"""The line on the terminal that shows the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.training.run import Run


def progress_line(run: Run, values: Mapping[str, float], *, global_rows: int) -> str:
    """Returns the progress of `run`, its last logged `values`, its remaining time, its next save, and its slowest rank.

    Args:
        global_rows: rows per step.
    """
    save_steps = run.parameters.checkpoint.save_steps
    next_save = (run.step // save_steps + 1) * save_steps
    if run.length.unit == "tokens":
        done = f"step {run.step:,}  {run.consumed_tokens:,}/{run.length.tokens:,} tokens"
        remaining = max(0, run.length.tokens - run.consumed_tokens) / max(1e-9, values["tokens_per_second"])
    else:
        done = f"step {run.step:,}/{run.max_steps:,}"
        remaining = (run.max_steps - run.step) * global_rows / max(1e-9, values["samples_per_second"])
        next_save = min(run.max_steps, next_save)
    slowest = ""
    if run.context.heartbeat is not None and "slowest_rank" in values:
        name = run.context.heartbeat.name(int(values["slowest_rank"]))
        slowest = f"  slowest {name} +{values['slowest_rank_excess']:.0%}"
    return (
        f"{done}  loss {values['loss']:.4f}  "
        f"{values['tokens_per_second']:,.0f} tokens/s  learning rate {values['learning_rate']:.2e}  "
        f"remaining {_duration(remaining)}  next save at {next_save:,}{slowest}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
