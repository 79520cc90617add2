"""What each rank tells the others of itself, and which ranks are late by it. Nothing here communicates.

See docs/design/hangs.md.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from terakoya.distributed.topology import Topology
from terakoya.process_pool import is_alive
from terakoya_watch.activity import DEVICE, Activity

SILENT_BEATS = 6
"""A rank without news for so many beats is silent: its process is stopped or gone, or its host is."""
GONE_BEATS = 2
"""A rank of this host without news for so many beats, whose process does not exist any more, is gone."""
STUCK_SECONDS = 30.0
"""A rank that has not moved for so long while others wait for it is stuck, although its threads still run."""
SLOW_STEPS = 10
"""Devices that all ranks wait for hang after so many times the work of a step before its backward pass."""
FIRST_STEP_SECONDS = 300.0
"""The same before a step has ended."""
SHOWN = 4
"""How many late ranks a message names."""


@dataclass(frozen=True)
class Beat:
    """The news of one rank.

    Attributes:
        number: how many it has sent.
        activity: what its main thread does.
        work: how many steps it has worked through so far, and their seconds without waiting for others.
        error: the error that it ends with; None before.
        gives_up: whether it leaves, as it has waited for another in vain.
        ended: whether it has left the run, and sends no more.
        process: its process, as `process_here` names it; empty where the system does not say.
    """

    number: int
    activity: Activity
    work: tuple[int, float] = (0, 0.0)
    error: str | None = None
    gives_up: bool = False
    ended: bool = False
    process: str = ""

    def to_json(self) -> str:
        """Returns the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Returns the beat of a text by `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "activity": Activity(**values["activity"]), "work": tuple(values["work"])})


class Ranks:
    """What is known of some ranks from their beats. Times are counted in looks, as this process may have been stopped.

    Attributes:
        beats: the last beat of each rank.
    """

    def __init__(self, topology: Topology, own: int) -> None:
        self._topology = topology
        self._own = own
        self.beats: dict[int, Beat] = {}
        self._unchanged: dict[int, int] = {}
        self._last_news: dict[int, float] = {}
        self._work_before: dict[int, tuple[int, float]] = {}

    def look(self, beats: Mapping[int, Beat]) -> None:
        """Takes note of the beats that were read now."""
        for rank, beat in beats.items():
            known = self.beats.get(rank)
            if known is None or beat.number != known.number:
                self._unchanged[rank], self._last_news[rank] = 0, time.time()
            else:
                self._unchanged[rank] += 1
        self.beats.update(beats)

    def look_without_answer(self) -> None:
        """Takes note that the store does not answer: none of the other ranks can be heard."""
        self.look({rank: beat for rank, beat in self.beats.items() if rank != self._own})

    def late(self, *, after_an_error: bool = False) -> dict[int, str]:
        """Returns the ranks for which the others wait, with a sentence about each: those that have failed; else those
        that are silent; else those that are stuck while others wait.

        `after_an_error` of a connection a rank is silent sooner where its process is known to be gone. At the end of a
        run that says nothing: processes leave one after the other.
        """
        others = {rank: beat for rank, beat in self.beats.items() if rank != self._own}
        failed = {rank: beat for rank, beat in others.items() if beat.error is not None}
        if failed:
            return {rank: f"{self.name(rank)} ended with {beat.error}" for rank, beat in failed.items()}
        others = {rank: beat for rank, beat in others.items() if not beat.ended}
        gone = {rank for rank in others if after_an_error and self._is_gone(rank)}
        silent = {rank for rank in others if self._unchanged[rank] >= SILENT_BEATS}
        if gone or silent:
            return {rank: self._describe_silence(rank, is_gone=rank in gone) for rank in sorted({*gone, *silent})}
        now = time.time()
        still = {rank: beat for rank, beat in self.beats.items() if now - beat.activity.since >= STUCK_SECONDS}
        stuck = {rank: beat for rank, beat in still.items() if not beat.activity.waits and not beat.ended}
        if len(stuck) == len(still):
            return {}  # no rank waits for them
        return {rank: self._describe(rank, beat.activity) for rank, beat in stuck.items()}

    def _is_gone(self, rank: int) -> bool:
        """Whether `rank` is on this host, and its process, which sends nothing, does not exist any more."""
        if self._unchanged[rank] < GONE_BEATS:  # it may have said that it ends
            return False
        namespace, _, process = self.beats[rank].process.partition(" ")
        hosts = [self._topology.processes[each].host for each in (rank, self._own)]
        is_here = hosts[0] == hosts[1] and bool(namespace) and namespace == process_here().partition(" ")[0]
        return is_here and not is_alive(int(process))

    def beats_silent(self) -> int:
        """Returns for how many beats the rank that has been silent longest was so; 0 if none is."""
        silent = [
            count
            for rank, count in self._unchanged.items()
            if rank != self._own and count >= SILENT_BEATS and not self.beats[rank].ended
        ]
        return max(silent, default=0)

    def report(self, *, after_an_error: bool = False) -> str:
        """Returns which ranks are late and where the others wait for them; empty if none is late. See `late`."""
        late = self.late(after_an_error=after_an_error)
        if not late:
            return self._describe_hung_devices()
        named = [*list(late.values())[:SHOWN], *([f"{len(late) - SHOWN} more ranks" if len(late) > SHOWN else ""])]
        return "; ".join(filter(None, [*named, self.waiting(late)]))

    def _describe_hung_devices(self) -> str:
        """Returns that every rank has waited for its device for much longer than a step takes; empty where it is not
        so. What hangs then is a card, a link between cards, or NCCL, and no rank is to blame."""
        known = list(self.beats.values())
        if len(known) < len(self._topology.processes) or any(each.activity.place != DEVICE for each in known):
            return ""
        steps, seconds = max(each.work for each in known)
        since = max(each.activity.since for each in known)
        if time.time() - since < (max(STUCK_SECONDS, SLOW_STEPS * seconds / steps) if steps else FIRST_STEP_SECONDS):
            return ""
        step = known[0].activity.step
        return f"no rank's device has finished its work since {_clock(since)} (step {step:,}): a card or NCCL hangs"

    def waiting(self, late: Container[int] = ()) -> str:
        """Returns where the ranks that are not `late` wait: `rank 0 on a01 waits in all_reduce since 21:04:11`."""
        waits = {
            rank: beat.activity
            for rank, beat in self.beats.items()
            if rank not in late and beat.activity.waits and not beat.ended
        }
        if not waits:
            return ""
        first = min(waits, key=lambda rank: waits[rank].since)
        who = f"{self.name(first)} waits" if len(waits) == 1 else f"{len(waits)} ranks wait"
        return f"{who} in {waits[first].place} since {_clock(waits[first].since)}"

    def slowest(self) -> tuple[int, float] | None:
        """Returns the rank whose steps took longest since the last call, not counting where it waited for others, and
        by which share they took longer than the median of the others. None where not every rank has taken a step."""
        now = {rank: beat.work for rank, beat in self.beats.items()}
        before = self._work_before
        if len(now) < len(self._topology.processes):
            return None  # only rank 0 reads the beats of all
        if before.keys() != now.keys():
            self._work_before = now
            return None
        steps = {rank: now[rank][0] - before[rank][0] for rank in now}
        if min(steps.values()) < 0:  # the run went back to a checkpoint, and counts anew
            self._work_before = now
            return None
        if min(steps.values()) < 1:
            return None
        self._work_before = now
        seconds = {rank: (now[rank][1] - before[rank][1]) / steps[rank] for rank in now}
        rank = max(seconds, key=lambda rank: seconds[rank])
        usual = statistics.median(value for each, value in seconds.items() if each != rank)
        return (rank, seconds[rank] / usual - 1) if usual > 0 else None

    def gives_up(self, rank: int) -> bool:
        """Whether `rank` leaves, as it has waited for another in vain."""
        return rank in self.beats and self.beats[rank].gives_up

    def name(self, rank: int) -> str:
        """Returns `rank 3 on a02`."""
        return f"rank {rank} on {self._topology.processes[rank].host}"

    def _describe_silence(self, rank: int, *, is_gone: bool) -> str:
        activity, clock = self._describe(rank, self.beats[rank].activity), _clock(self._last_news[rank])
        if is_gone:
            return f"{activity}, and has not answered since {clock}: its process is gone"
        return f"{activity}, and has not answered since {clock}: its process is stopped or gone, or its host is"

    def _describe(self, rank: int, activity: Activity) -> str:
        since = _clock(activity.since)
        return f"{self.name(rank)} has been in {activity.place} since {since} (step {activity.step:,})"


def process_here() -> str:
    """Returns this process's id behind the namespace in which it counts: containers of one host have their own ids.
    Empty where the system has no namespaces."""
    try:
        return f"{Path('/proc/self/ns/pid').readlink()} {os.getpid()}"
    except OSError:
        return ""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
