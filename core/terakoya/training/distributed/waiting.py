"""Work that takes every rank its own time: those who are through wait for the slow, for as long as these live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from terakoya.errors import UserError
from terakoya.training.distributed.context import Connection

T = TypeVar("T")
SECONDS = 1.0
"""How often those who are at work let the others know."""


class Leaving(Exception):  # noqa: N818 - no error: what a thread ends with when nobody wants its work any more
    """This process leaves the training, and what it does beside it."""


def everyone(
    connection: Connection, action: str, work: Callable[[], T], *, leaving: threading.Event | None = None
) -> list[T]:
    """Runs `work` on every rank; returns what it gave, by rank, once all are through.

    Meanwhile ranks hear of each other: the timeout of `connection` bounds for how long one that is gone goes unnoticed,
    not how long work may take.

    Args:
        action: what this is, for errors.
        leaving: set when this process is about to leave.

    Raises:
        UserError: on every rank, if `work` met an OSError or UserError on any; names the ranks.
        Leaving: `leaving` is set.
        RuntimeError: another process is gone.
    """
    through, gone = threading.Event(), threading.Event()
    result: T | None = None
    failure: Exception | None = None
    with ThreadPoolExecutor(1, "waiting") as pool:
        others = pool.submit(_until_all, connection, through, (gone, leaving or gone))
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
    connection.together(action, failure)
    return connection.gather(result)


def _until_all(connection: Connection, through: threading.Event, leave: tuple[threading.Event, ...]) -> None:
    """Returns when all ranks have set `through`, raises Leaving when an event of `leave` is set here."""
    while True:
        through.wait(SECONDS)
        if any(event.is_set() for event in leave):
            raise Leaving
        if connection.sum_counts([int(through.is_set())]) == [connection.world_size]:
            return
