"""Contestants that take turns, each in a process of its own: what one sets up or leaves in memory is no other's."""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple


class Step(NamedTuple):
    """One optimizer step: real tokens, seconds of wall time, seconds of CPU time of all threads of the process."""

    tokens: int
    wall: float
    cpu: float


class Turn(NamedTuple):
    """What a contestant did in one round: its timed steps, and facts worth printing."""

    steps: list[Step]
    facts: Mapping[str, float]

    def rate(self, clock: str) -> float:
        """Real tokens a second of `clock`, "wall" or "cpu"."""
        return sum(step.tokens for step in self.steps) / sum(getattr(step, clock) for step in self.steps)


Contestant = Callable[[int], Turn]
"""Takes the number of the round; must be picklable (a function of a module, or a `functools.partial` of one)."""


def interleave(contestants: Mapping[str, Contestant], rounds: int) -> Iterator[tuple[int, str, Turn]]:
    """Every contestant in turn, `rounds` times, one at a time. Yields the round's number, the name and the turn."""
    context = multiprocessing.get_context("spawn")
    with _started(context, contestants) as pipes:
        for number in range(rounds):
            for name, pipe in pipes.items():
                pipe.send(number)
                answer = pipe.recv()
                if isinstance(answer, str):
                    raise RuntimeError(f"{name}:\n{answer}")
                yield number, name, answer


def race(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, list[Turn]]:
    """All turns of all contestants by name, each printed as it ends."""
    width = max(map(len, contestants))
    results: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number, name, turn in interleave(contestants, rounds):
        results[name].append(turn)
        print(
            f"round {number + 1}  {name:{width}} {len(turn.steps)} steps, {sum(step.tokens for step in turn.steps):6,} "
            f"tokens: {turn.rate('cpu'):7,.0f} per CPU second, {turn.rate('wall'):7,.0f} per second of wall time",
            flush=True,
        )
    return results


def median(turns: list[Turn], clock: str) -> float:
    """The median over rounds of the tokens a second of `clock`."""
    return statistics.median(turn.rate(clock) for turn in turns)


@contextmanager
def _started(
    context: multiprocessing.context.SpawnContext, contestants: Mapping[str, Contestant]
) -> Iterator[dict[str, Connection]]:
    pipes, processes = {}, []
    for name, contestant in contestants.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(contestant, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(10.0)
            process.kill()


def _serve(contestant: Contestant, pipe: Connection) -> None:
    """Answers each number with a turn, or with the text of what went wrong; ends when the other end is closed."""
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(contestant(number))
        except BaseException:
            pipe.send(traceback.format_exc())
            raise
