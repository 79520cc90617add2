"""lion-pytorch's Lion, which may be asked for a step of some of its groups alone, as ZeRO's third stage does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lion_pytorch.foreach import Lion


class LionByGroups(Lion):
    """Passes over groups in which nothing has a gradient: its torch functions want at least one tensor."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every weight that has a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if any(each.grad is not None for each in group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups
