"""Gradient norms since the last check: a norm that is not finite ends a run; in fp16 it is only reported."""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya.errors import UserError
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog


class GradientNorms:
    """The norms of steps, kept on the device, so that no step waits for its norm."""

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler
        self.norms: list[Tensor] = []

    def add(self, norm: Tensor) -> None:
        """Adds the norm of one step, a float32 scalar on the device."""
        self.norms.append(norm)

    def values(self) -> dict[str, float]:
        """Returns the values to log: the norm of the last step; in fp16 also the loss scale and the skipped steps."""
        return {"grad_norm": float(self.norms[-1]), **(self.scaler.log_values() if self.scaler else {})}

    def check(self, run: Run, run_log: RunLog, *, first_row: int) -> None:
        """Checks all norms since the last check and forgets them. Called before each save, on every rank alike.

        Args:
            first_row: the first row of the last step.

        Raises:
            UserError: a gradient was not finite; in fp16, the loss scale is already at its minimum.
        """
        bad = int((~torch.isfinite(torch.stack(self.norms))).sum()) if self.norms else 0
        self.norms.clear()
        if self.scaler is not None:
            if bad:
                scale = f"loss scale {float(self.scaler.scale):,.10g}"
                run_log.print(f"step {run.step:,}: {bad} step(s) skipped, as gradients overflowed fp16; {scale}")
            self.scaler.raise_if_stuck(run.step)
        elif bad:
            raise UserError(
                f"step {run.step}: gradients were not finite in {bad} step(s) since the last check; such steps leave "
                f"weights and moments unchanged, and no checkpoint was written since. Lower "
                f"optimizer.learning_rate, or look at rows {first_row:,} to {run.consumed_rows:,} of the training order"
            )
