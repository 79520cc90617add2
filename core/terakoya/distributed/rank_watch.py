"""What a plugin knows of the ranks of a run, one of which may hang or be gone (`hookspecs.register_watches`), and which
errors may come of that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from terakoya.errors import RankLostError

COMMUNICATION_ERRORS = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|Broken pipe|[Tt]imed out", re.I)
"""What torch's errors say where the cause may be another rank. Only some have a class of their own."""
USAGE = "ncclInvalidUsage"
"""What NCCL says where the cause is no other rank."""


class RankWatch(Protocol):
    """Watches the other ranks from a thread of this process; `say` prints a warning and logs it."""

    say: Callable[[str], None]

    def close(self) -> None:
        """Ends it; the other ranks no longer expect news of this one."""

    def follow(self, *, step: Callable[[], int], work: Callable[[], tuple[int, float]]) -> None:
        """Tells the others from now on of a run: of its step, and of how many steps this rank has worked through, and
        their seconds without waiting for others."""

    def leave(self) -> None:
        """Names no late rank from now on: what some do after the last step may take hours."""

    def slowest(self) -> tuple[int, float] | None:
        """Returns on rank 0 the rank whose steps took longest since the last call, and by which share they took longer
        than those of the others."""

    def name(self, rank: int) -> str:
        """Returns `rank 3 on a02`."""

    def explain(self, error: BaseException) -> RankLostError | None:
        """Returns the error that names the rank because of which this one failed with `error`; None where the cause is
        on this rank, which the others then hear of."""


def find_communication_error(error: BaseException | None) -> BaseException | None:
    """Returns the first that may come of another rank among `error` and those that it was raised from: a pipeline wraps
    what a stage raises, and does not repeat its text. NCCL's refusal of a wrong usage, such as two ranks on one GPU, is
    no such error."""
    while error is not None and not isinstance(error, dist.DistError):
        if not isinstance(error, RuntimeError):
            return None
        if COMMUNICATION_ERRORS.search(str(error)):
            return error
        error = error.__cause__
    return None if USAGE in str(error) else error
