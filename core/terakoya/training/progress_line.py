"""What a run says of its progress: its last logged values, its remaining time, its next save, its slowest rank."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.training import gpu_state
from terakoya.training.run import Run
from terakoya.training.screen import StepView, bits_per_character, duration, step_cells

LARGE_EXCESS = 10.0
"""The share of which the log says no more than that it is larger: the other ranks have hardly worked."""


def describe_excess(share: float) -> str:
    """Returns in words how much longer the slowest rank works than the others: `+21%`."""
    return f"+{share:.0%}" if share <= LARGE_EXCESS else f"over +{LARGE_EXCESS:.0%}"


def view_step(run: Run, values: Mapping[str, float], *, remaining_rows: float, title: str = "") -> StepView:
    """Returns the view of the step of `run` with the logged `values`.

    Args:
        remaining_rows: rows of the current length that the rest of the run takes.
        title: what the part of the run is called that has the step.
    """
    save_steps = run.parameters.checkpoint.save_steps
    next_save = (run.step // save_steps + 1) * save_steps
    step = f"{run.step:,}"
    if run.length.unit == "tokens":
        done = f"{run.consumed_tokens:,}/{run.length.tokens:,} tokens"
        share = run.consumed_tokens / max(1, run.length.tokens)
        remaining = max(0, run.length.tokens - run.consumed_tokens) / max(1e-9, values["tokens_per_second"])
        first = f"step {step}  {done}"
    else:
        done = f"{step}/{run.max_steps:,}"
        share = run.step / max(1, run.max_steps)
        remaining = remaining_rows / max(1e-9, values["samples_per_second"])
        next_save = min(run.max_steps, next_save)
        first = f"step {done}"
    if title:
        first = f"{first}  {title}"
    slowest = ""
    if run.context.heartbeat is not None and "slowest_rank" in values:
        name = run.context.heartbeat.name(int(values["slowest_rank"]))
        slowest = f"slowest {name} {describe_excess(values['slowest_rank_excess'])}"
    gpu = gpu_state.describe(values)
    number = bits_per_character(values)
    bits = "" if number is None else f"{number:.4f} bits/character"
    line = (
        f"{first}  loss {values['loss']:.4f}{bits and f'  {bits}'}  "
        f"{values['tokens_per_second']:,.0f} tokens/s  learning rate {values['learning_rate']:.2e}  "
        f"remaining {duration(remaining)}  next save at {next_save:,}{slowest and f'  {slowest}'}"
        f"{gpu and f'  {gpu}'}"
    )
    shown = (done, f"{duration(remaining)} left", title, f"next save at {next_save:,}", slowest, gpu)
    return StepView(step_cells(values, step=step), min(1.0, share), tuple(filter(None, shown)), line)
