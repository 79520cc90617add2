"""Every file call of every command with every fault, one of those that are equal (see `file_moments.py`).

    python tests/helpers/every_fault.py [--minutes M] [--workers N] [--seed S] [--skip K] [--count] [NAME...]

tries them in an order in which every command and fault has its turn, prints what went wrong, and then a row of a table
for each command and rank. The order is the same in each run of one tree: --skip goes on where another run ended.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faulty_commands import EVERY, World, make_world, workers
from file_faults import ACTIONS
from file_moments import Moment

WORKERS = 2 * (os.cpu_count() or 1)
"""Two for each core: ranks wait for each other, and for news of one that was killed."""


@dataclass(frozen=True)
class Try:
    """A call of a rank of a command and what goes wrong there."""

    name: str
    rank: int
    action: str
    call: int


def possible(world: World, name: str, rank: int) -> Iterator[tuple[Try, Moment]]:
    """Every call of `rank` with every fault that it can have: only writes are torn."""
    for action, moment in itertools.product(ACTIONS, world.moments(name, rank)):
        if action != "torn write" or moment.kind == "write":
            yield Try(name, rank, action, moment.number), moment


def different(world: World, commands: Iterable[tuple[str, int]] = EVERY) -> dict[tuple[str, int], list[Try]]:
    """The tries of each command and rank, without those that are equal to one before."""
    known: set[tuple[object, ...]] = set()
    found: dict[tuple[str, int], list[Try]] = {}
    for name, rank in commands:
        tries = found[name, rank] = []
        for each, moment in possible(world, name, rank):
            key = what_counts(each, moment, world.verbs[name].ranks)
            if key not in known:
                known.add(key)
                tries.append(each)
    return found


def what_counts(each: Try, moment: Moment, ranks: int) -> tuple[object, ...]:
    """What makes a try another one."""
    if each.action == "kill":
        return each.action, each.name, each.rank, moment.content
    if each.action == "torn write":
        return each.action, each.name, each.rank, moment.content, moment.path
    return each.action, ranks, each.rank, moment.kind, moment.stack, moment.path, moment.names


def try_all(places: Sequence[World], tries: Sequence[Try], deadline: float = float("inf")) -> Mapping[Try, str]:
    """Lets the calls go wrong, each in a start of its own, in all `places` at a time, until `deadline` (of
    `time.monotonic`). Returns what was seen: "killed", "ended with an error", "coped", or what was wrong."""
    seen: dict[Try, str] = {}
    waiting: queue.SimpleQueue[Try] = queue.SimpleQueue()
    for each in tries:
        waiting.put(each)

    def work(own: World) -> None:
        while time.monotonic() < deadline:
            try:
                each = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                seen[each] = own.check(each.name, each.action, each.call, each.rank)
            except AssertionError as error:
                seen[each] = f"wrong: {error}"
            sys.stderr.write(f"{each.name}\t{each.rank}\t{each.action}\t{each.call}\t{seen[each]}\n")

    threads = [threading.Thread(target=work, args=(own,)) for own in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def in_turn(queues: Sequence[Sequence[Try]]) -> list[Try]:
    """All of `queues`: the first of each, then the next of each, until all are empty."""
    return [each for turn in itertools.zip_longest(*queues) for each in turn if each is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="commands; all without")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to end")
    parser.add_argument("--workers", type=int, default=WORKERS, help="tries at a time")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of a command's calls")
    parser.add_argument("--skip", type=int, default=0, help="how many of the first tries are left out")
    parser.add_argument("--count", action="store_true", help="print the table without trying anything")
    arguments = parser.parse_args()
    begun = time.monotonic()
    chosen = [(name, rank) for name, rank in EVERY if not arguments.names or name in arguments.names]
    with tempfile.TemporaryDirectory() as folder, make_world(Path(folder)) as world:
        tries = different(world, chosen)
        queues = []
        for key, action in itertools.product(chosen, ACTIONS):
            calls = [each for each in tries[key] if each.action == action]
            queues.append(random.Random(f"{arguments.seed} {key} {action}").sample(calls, len(calls)))
        seen: Mapping[Try, str] = {}
        if not arguments.count:
            with workers(world, arguments.workers) as places:
                seen = try_all(places, in_turn(queues)[arguments.skip :], begun + 60 * arguments.minutes)
        for problem in (text for text in seen.values() if text.startswith("wrong")):
            sys.stdout.write(f"{problem}\n\n")
        for name, rank in chosen:
            sys.stdout.write(row(world, name, rank, tries[name, rank], seen))
        every = sum(len(list(possible(world, *key))) for key in chosen)
        differ, spent = sum(map(len, tries.values())), resource.getrusage(resource.RUSAGE_CHILDREN)
        minutes, busy = (time.monotonic() - begun) / 60, (spent.ru_utime + spent.ru_stime) / 60
        sys.stdout.write(f"{len(seen):,} tried of {differ:,} that differ of {every:,}, in {minutes:.0f} minutes ")
        sys.stdout.write(f"and {busy:.0f} of CPU time\n")


def row(world: World, name: str, rank: int, tries: Sequence[Try], seen: Mapping[Try, str]) -> str:
    """A row of the table: calls, possible tries, those that differ, those tried, and what was seen."""
    outcomes = Counter(seen[each].partition(":")[0] for each in tries if each in seen)
    counts = [len(world.calls(name, rank)), len(list(possible(world, name, rank))), len(tries), outcomes.total()]
    counts += [outcomes[each] for each in ("killed", "ended with an error", "coped", "wrong")]
    return f"| `{name}` | {rank} | {' | '.join(map(str, counts))} |\n"


if __name__ == "__main__":
    main()
