"""The one line that says where a run is."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.training.run import Run


def progress_line(run: Run, values: Mapping[str, float], *, rows: int) -> str:
    """How far `run` is, what its last logged `values` were, how long it will take, when it saves; a step is of `rows`
    rows."""
    save = run.parameters.checkpoint.save_steps
    next_save = (run.step // save + 1) * save
    if run.length.unit == "tokens":
        done = f"step {run.step:,}  {run.consumed_tokens:,}/{run.length.tokens:,} tokens"
        left = max(0, run.length.tokens - run.consumed_tokens) / max(1e-9, values["tokens_per_second"])
    else:
        done = f"step {run.step:,}/{run.max_steps:,}"
        left = (run.max_steps - run.step) * rows / max(1e-9, values["samples_per_second"])
        next_save = min(run.max_steps, next_save)
    return (
        f"{done}  loss {values['loss']:.4f}  "
        f"{values['tokens_per_second']:,.0f} tokens/s  learning rate {values['learning_rate']:.2e}  "
        f"left {_duration(left)}  next save at {next_save:,}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
