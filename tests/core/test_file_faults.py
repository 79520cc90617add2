"""Every file call of every command that writes: killed there, torn, on a full or failing disk, and cut from power.

A command that was killed goes on, or starts again, with the same result. One that meets an error says so and ends, or
copes with it; what has its final name is whole, and the same command then gives the same result. `make nightly` tries
some of each command's calls, other ones each night, the normal run a few; `every_fault.py` tries every call with every
fault, one of those that are equal.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator
from pathlib import Path

import file_faults
import pytest
from every_fault import WORKERS, Try, different, try_all
from faulty_commands import EVERY, ONE_RANK, World, instants, make_world, workers
from file_faults import ACTIONS, FULL
from selection import at_night

TRIES = 40
"""Calls of each command that a night lets go wrong."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("faults")) as made:
        yield made


QUICK = ("train bert", "store merge", "report")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in ONE_RANK if name not in QUICK)]
)
def test_a_power_cut_at_any_instant_leaves_nothing_half_under_a_final_name(name: str, world: World) -> None:
    assert file_faults.power_cut_problems(Path(f"{world.straight(name)}.log")) == []
    assert "rename" in world.calls(name), "something was given its final name"


def test_a_power_cut_leaves_the_records_of_all_saved_steps(world: World) -> None:
    """metrics.jsonl is flushed after its last change and before each checkpoint gets its name."""
    lines = [line.split("\t") for line in Path(f"{world.straight('train bert')}.log").read_text().splitlines()]
    last, flushed = "", []
    for _, kind, _, path, second in lines:
        if path.endswith("metrics.jsonl"):
            last = kind
        if kind == "rename" and "/step-" in second and "staging" in path:
            flushed.append(last)
    assert flushed == ["fsync"] * 3


def test_what_was_not_flushed_is_found(world: World, tmp_path: Path) -> None:
    """The check of power cuts itself: a file and a folder that are renamed, neither flushed."""
    log = tmp_path / "log"
    log.write_text(
        "1\tmkdir\t0\t/d/.out\t\n2\tcreate\t0\t/d/.out/a\t\n3\twrite\t7\t/d/.out/a\t\n"
        "0\ttree folder\t6\t/d/.out\t\n0\ttree\t7\t/d/.out/a\t\n4\trename\t6\t/d/.out\t/d/out\n"
    )
    assert file_faults.power_cut_problems(log) == [
        "/d/.out was not flushed before /d/out got its name",
        "/d/.out/a was not flushed before /d/out got its name",
        "the name of /d/out was not flushed",
    ]


SAMPLE = [
    ("train bert", "kill", 0.55), ("tokenizer train", "torn write", 0.5), ("report", "ENOSPC", 0.5),
    ("store merge", "EIO", 0.2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "action", "share"), at_night(SAMPLE, always=SAMPLE[:2]))
def test_a_command_that_met_a_fault_goes_on_to_the_same_result(
    name: str, action: str, share: float, world: World
) -> None:
    calls = instants(world, name, action)
    world.check(name, action, calls[int(share * len(calls))])


def test_equal_faults_are_tried_once(world: World) -> None:
    tries = different(world, [("store merge", 0)])["store merge", 0]
    calls = world.calls("store merge")
    tried = {action: {each.call for each in tries if each.action == action} for action in ACTIONS}
    after = {kind: {number + 1 for number, each in enumerate(calls[:-1], 1) if each == kind} for kind in set(calls)}
    assert not tried["kill"] & after["fsync"], "a flush changes nothing that a killed process leaves"
    assert tried["kill"] >= after["rename"] | after["create"] | {1}
    assert tried["EIO"] == tried["ESTALE"] >= {number - 1 for number in after["rename"] | after["create"]}
    assert len(tried["torn write"]) < len(tried["EIO"]) < len(calls), "what is written in a row to a draft is one"


def test_a_disk_that_stays_full_ends_a_run_with_what_to_do(world: World) -> None:
    """From the second save on; the third attempt at the last one ends it."""
    calls = world.calls("train bert")
    second_save = [number for number, kind in enumerate(calls, 1) if kind == "rename"][3]
    case = world.folder / "full"
    ended = world.run("train bert", case, call=second_save, action=FULL)
    assert ended.codes == [74] and "Traceback" not in ended.printed
    assert "2 of 3 failed saves in a row" in ended.printed and "3 saves in a row failed" in ended.printed
    assert ended.printed.endswith("is safe; free some space and give the same command again\n")
    assert "records of metrics.jsonl are missing" in ended.printed
    assert world.run("train bert", case).codes == [0]
    assert world.content("train bert", case) == world.content("train bert", world.straight("train bert"))


@pytest.fixture(scope="module")
def tries(world: World) -> dict[tuple[str, int], list[Try]]:
    return different(world)


@pytest.fixture(scope="module")
def places(world: World) -> Iterator[list[World]]:
    with workers(world, WORKERS) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "rank"), EVERY)
def test_other_calls_of_every_command_each_night(
    name: str, rank: int, tries: dict[tuple[str, int], list[Try]], places: list[World]
) -> None:
    possible = tries[name, rank]
    draw = random.Random(f"{name} {rank} {datetime.date.today()}")
    seen = try_all(places, draw.sample(possible, min(TRIES, len(possible))))
    problems = [text for text in seen.values() if text.startswith("wrong")]
    assert not problems, f"{len(problems)} calls:\n" + "\n\n".join(problems)
