"""Gradient norms since they were last looked at: what was no number ends a run, or in fp16 is told of."""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya.errors import UserError
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog


class Norms:
    """The norms of steps, on the device, so that no step waits for one."""

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler
        self.norms: list[Tensor] = []

    def add(self, norm: Tensor) -> None:
        """Takes the norm of one more step."""
        self.norms.append(norm)

    def values(self) -> dict[str, float]:
        """What is logged: the last step's norm, in fp16 the scale and how many steps of the run were left out."""
        return {"grad_norm": float(self.norms[-1]), **(self.scaler.log_values() if self.scaler else {})}

    def look(self, run: Run, run_log: RunLog, *, first_row: int) -> None:
        """Looks at all of them and forgets them; `first_row` is the first row of the last step. Called before anything
        is kept, on every rank alike.

        Raises:
            UserError: a gradient was no number; in fp16, no lower scale is left.
        """
        bad = int((~torch.isfinite(torch.stack(self.norms))).sum()) if self.norms else 0
        self.norms.clear()
        if self.scaler is not None:
            if bad:
                scale = f"loss scale {float(self.scaler.scale):,.10g}"
                run_log.print(f"step {run.step:,}: {bad} step(s) left out, as gradients overflowed fp16; {scale}")
            self.scaler.raise_if_stuck(run.step)
        elif bad:
            raise UserError(
                f"step {run.step}: gradients were not finite in {bad} step(s) since the last look; such steps leave "
                f"weights and moments as they were, and no checkpoint was written since. Lower "
                f"optimizer.learning_rate, or look at rows {first_row:,} to {run.consumed_rows:,} of the training order"
            )
