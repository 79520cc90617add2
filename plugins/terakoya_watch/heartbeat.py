"""Every rank tells the others each second what it does, so that a rank that hangs or is gone is called by its name.

The values travel through the store at which the processes met (torch's TCPStore), from a thread of each process: there
is no collective, and nothing in the step waits. Rank 0 reads all values; the others read those of rank 0 alone.

See docs/design/hangs.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from terakoya.distributed.rank_watch import find_communication_error
from terakoya.distributed.topology import Topology
from terakoya.errors import RankLostError, UserError
from terakoya_watch.activity import Activity, ActivityWatch
from terakoya_watch.beats import SILENT_BEATS, Beat, Ranks, process_here

logger = logging.getLogger("terakoya")

BEAT_SECONDS = 1.0
LEAVE_SECONDS = 10.0
"""How long after the timeout the main thread may take to leave before its process ends."""


class Heartbeat:
    """The threads of this process that send its beats and watch for the others.

    Attributes:
        say: prints a warning and logs it.
    """

    def __init__(self, topology: Topology, rank: int, timeout_seconds: float, meeting: str) -> None:
        """Starts the threads. `meeting` is a text that these processes share and those of an earlier start, whose beats
        may still lie in the store, do not. torchrun's count of restarts is none: each agent has its own."""
        self.say: Callable[[str], None] = logger.warning
        self._step: Callable[[], int] = lambda: 0
        self._work: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._topology = topology
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._ranks = Ranks(topology, rank)
        self._prefix = f"terakoya/beat/{meeting}"
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=4 * timeout_seconds + 600),  # a store that hangs is noticed by `_watch`
        )
        self._activity = ActivityWatch(threading.main_thread().ident or 0, lambda: self._step())
        self._beat = Beat(0, self._activity.look(), process=process_here())
        self._error: str | None = None
        self._beats_done = 0
        self._lost_store = self._leaving = self._gives_up = False
        self._report, self._silent_on_rank_0 = "", 0.0
        self._closed = threading.Event()
        self._read = range(len(topology.processes)) if rank == 0 else (0, rank)
        self._ranks.look({each: Beat(-1, Activity("start-up", False, time.time(), 0)) for each in self._read})
        self._store.set(self._key(rank), self._beat.to_json())
        if rank == 0:  # the others would wait for it in C++, even after this rank has left
            self._store.set(self._report_key, "0 ")
        self._threads = [
            threading.Thread(target=target, name=f"heartbeat {target.__name__}", daemon=True)
            for target in (self._send_beats, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """See `RankWatch`."""
        if self._closed.is_set():
            return
        self._closed.set()
        # A thread that is inside torch while Python ends aborts the process: it is waited for, unless others are lost
        # and the store hangs; and it must not be the last to hold the model.
        self._step, self._work = lambda: 0, lambda: (0, 0.0)
        for thread in reversed(self._threads):
            thread.join(2 * BEAT_SECONDS if self._leaving else LEAVE_SECONDS)
        if not self._threads[0].is_alive() and not self._lost_store:
            with contextlib.suppress(dist.DistError):
                self._store.set(self._key(self._rank), replace(self._beat, ended=True).to_json())

    def follow(self, *, step: Callable[[], int], work: Callable[[], tuple[int, float]]) -> None:
        """See `RankWatch`."""
        self._step, self._work = step, work

    def leave(self) -> None:
        """See `RankWatch`. One that is silent beyond the timeout ends this process all the same."""
        self._leaving = True

    def slowest(self) -> tuple[int, float] | None:
        """See `Ranks.slowest`; only rank 0 knows it."""
        return self._ranks.slowest()

    def name(self, rank: int) -> str:
        """See `RankWatch`."""
        return self._ranks.name(rank)

    def explain(self, error: BaseException) -> RankLostError | None:
        """See `RankWatch`. Waits some seconds for news of the others."""
        self._leaving = True
        found = find_communication_error(error)
        if found is None:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self._error = f"{kind}{error}"[:500]
            if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
                self._wait_until_heard()
            return None
        deadline = time.monotonic() + (SILENT_BEATS + 4) * BEAT_SECONDS
        while time.monotonic() < deadline:
            if report := self._ranks.report(after_an_error=True) or self._report:
                break
            time.sleep(0.1)
        if self._rank == 0:
            self._gives_up = True
            self._wait_until_heard()
        where = self._ranks.waiting()
        lost = "lost the connection to another rank"
        report = report or (f"{lost}, and all still answer: {where}" if where else f"{lost}, which has just ended")
        first_line = (str(found).strip() or type(found).__name__).splitlines()[0]
        return RankLostError(
            f"{report}. The same command continues from the last checkpoint. ({self.name(self._rank)} got from torch: "
            f"{first_line[:300]}; TERAKOYA_DEBUG=1 shows all of it)"
        )

    def _wait_until_heard(self) -> None:
        """Waits until the other ranks have read this one's news: the store may end with this process."""
        sent = self._beats_done
        deadline = time.monotonic() + 4 * BEAT_SECONDS
        while self._beats_done < sent + 2 and not self._lost_store and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.5 * BEAT_SECONDS)

    # ------------------------------------------------------------------------------------------------ the threads

    def _send_beats(self) -> None:
        """Sends this rank's beats and reads those of others, each second, as long as the store is there."""
        try:
            while not self._closed.wait(BEAT_SECONDS):
                number, activity = self._beat.number + 1, self._activity.look()
                news = (self._work(), self._error, self._gives_up)
                self._beat = Beat(number, activity, *news, process=self._beat.process)
                self._store.set(self._key(self._rank), self._beat.to_json())
                values = self._store.multi_get([self._key(rank) for rank in self._read])
                self._ranks.look({rank: Beat.from_json(value) for rank, value in zip(self._read, values, strict=True)})
                if self._rank == 0:
                    self._report = self._ranks.report(after_an_error=True)  # the others read it after an error alone
                    self._store.set(self._report_key, f"{self._seconds_silent()} {self._report}")
                else:
                    seconds, _, self._report = self._store.get(self._report_key).decode().partition(" ")
                    self._silent_on_rank_0 = float(seconds)
                self._beats_done += 1
        except RuntimeError:  # of torch: the store is gone
            self._lost_store = True

    def _watch(self) -> None:
        """Says which rank is late, and ends this process where its main thread hangs beyond the timeout."""
        spoken, done, given_up = False, -1, 0.0
        while not self._closed.wait(BEAT_SECONDS):
            if self._lost_store or done == self._beats_done:  # the store is in rank 0's process, or on its host
                self._ranks.look_without_answer()
            done = self._beats_done
            report = self._ranks.report()
            if report and not spoken and not self._leaving and self._speaks():
                spoken = True
                self.say(f"{report}. Without an answer the run ends after {self._timeout_seconds:g} s")
            elif spoken and not report:
                spoken = False
                self.say("all ranks answer again")
            if self._ranks.gives_up(0):
                given_up = given_up or time.monotonic()
            silent = max(self._seconds_silent(), self._silent_on_rank_0)
            last = LEAVE_SECONDS + (3 * BEAT_SECONDS if self._rank == 0 else 0.0)  # the others hear it from rank 0
            if silent >= self._timeout_seconds + last or (given_up and time.monotonic() - given_up > LEAVE_SECONDS):
                self.say(f"{report or self._report}. This process leaves; the same command continues")
                os._exit(RankLostError.exit_code)

    def _seconds_silent(self) -> float:
        return self._ranks.beats_silent() * BEAT_SECONDS

    def _speaks(self) -> bool:
        """Whether this rank says who is late: rank 0, and of rank 0 also rank 1 and the first rank of each node."""
        return self._rank <= 1 or self._topology.processes[self._rank].local_rank == 0

    @property
    def _report_key(self) -> str:
        return f"{self._prefix}/report"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"
