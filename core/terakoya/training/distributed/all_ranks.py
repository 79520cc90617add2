"""Work that takes every rank its own time: those who are through wait for the slow, for as long as these live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from terakoya.errors import UserError
from terakoya.training.distributed.context import DistributedContext

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
"""How often those who are at work let the others know."""


class Shutdown(Exception):  # noqa: N818 - no error: what a thread ends with when nobody wants its work any more
    """This process leaves the training, and what it does beside it."""


def run_on_all_ranks(
    context: DistributedContext, action: str, work: Callable[[], T], *, shutdown: threading.Event | None = None
) -> list[T]:
    """Runs `work` on every rank; returns what it gave, by rank, once all are through.

    Meanwhile ranks hear of each other: the timeout of `context` bounds for how long one that is gone goes unnoticed,
    not how long work may take.

    Args:
        action: what this is, for errors.
        shutdown: set when this process is about to leave.

    Raises:
        UserError: on every rank, if `work` met an OSError or UserError on any; names the ranks.
        Shutdown: `shutdown` is set.
        RuntimeError: another process is gone.
    """
    through, gone = threading.Event(), threading.Event()
    result: T | None = None
    failure: Exception | None = None
    with ThreadPoolExecutor(1, "waiting") as pool:
        others = pool.submit(_until_all, context, through, (gone, shutdown or gone))
        try:
            try:
                result = work()
            except (OSError, UserError) as error:
                failure = error
            through.set()
            others.result()
        except BaseException:
            gone.set()
            raise
    context.raise_on_all_ranks(action, failure)
    return context.gather(result)


def _until_all(context: DistributedContext, through: threading.Event, leave: tuple[threading.Event, ...]) -> None:
    """Returns when all ranks have set `through`, raises Shutdown when an event of `leave` is set here."""
    while True:
        through.wait(HEARTBEAT_SECONDS)
        if any(event.is_set() for event in leave):
            raise Shutdown
        if context.sum_counts([int(through.is_set())]) == [context.world_size]:
            return
