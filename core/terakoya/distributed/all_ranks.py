"""Work that takes a different time on every rank: ranks that finish early wait, as long as the others are alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from terakoya.distributed.context import DistributedContext
from terakoya.errors import UserError

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
"""How often ranks that are still working signal that to the others."""


class Shutdown(Exception):  # noqa: N818 - not an error: a thread ends with it when its work is no longer needed
    """This process is leaving the training, and abandons what its threads do in the background."""


def run_on_all_ranks(
    context: DistributedContext, action: str, work: Callable[[], T], *, shutdown: threading.Event | None = None
) -> list[T]:
    """Runs `work` on every rank and returns its results, by rank, once all ranks have finished.

    Meanwhile the ranks exchange heartbeats: the timeout of `context` limits how long a lost process goes unnoticed, not
    how long the work may take.

    Args:
        action: a name of the work, for errors.
        shutdown: set when this process is about to leave.

    Raises:
        UserError: on every rank, if `work` raised an OSError or UserError on any of them; names the ranks.
        Shutdown: `shutdown` is set.
        RuntimeError: another process is gone.
    """
    finished, failed = threading.Event(), threading.Event()
    result: T | None = None
    error: Exception | None = None
    with ThreadPoolExecutor(1, "heartbeat") as pool:
        heartbeat = pool.submit(_beat_until_all_finish, context, finished, (failed, shutdown or failed))
        try:
            try:
                result = work()
            except (OSError, UserError) as raised:
                error = raised
            finished.set()
            heartbeat.result()
        except BaseException:
            failed.set()
            raise
    context.raise_on_all_ranks(action, error)
    return context.gather(result)


def _beat_until_all_finish(
    context: DistributedContext, finished: threading.Event, abort: tuple[threading.Event, ...]
) -> None:
    """Returns when all ranks have set `finished`; raises Shutdown when an event of `abort` is set on this rank."""
    while True:
        finished.wait(HEARTBEAT_SECONDS)
        if any(event.is_set() for event in abort):
            raise Shutdown
        if context.sum_counts([int(finished.is_set())]) == [context.world_size]:
            return
