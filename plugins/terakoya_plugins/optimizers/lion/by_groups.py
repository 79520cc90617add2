"""lion-pytorch's Lion that can step when only some of its groups have gradients, as in ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lion_pytorch.foreach import Lion


class LionByGroups(Lion):
    """Skips groups in which no weight has a gradient: the torch functions of Lion need at least one tensor."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every weight that has a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if any(each.grad is not None for each in group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups
