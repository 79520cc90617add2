"""The status of a run in every state of its folder."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import write_checkpoint, write_manifest
from rich.console import Console

from terakoya.commands.status import render
from terakoya.errors import UserError
from terakoya.runs import checkpoints
from terakoya.runs import files as run_files
from terakoya.runs import status as run_status
from terakoya.runs.folder import lock_run

NOW = 1_800_000_000.0


def step(number: int, *, at: float, loss: float | None = 2.0, tokens: int = 1000) -> dict[str, Any]:
    """Step `number`, logged `at` seconds after NOW."""
    values = {"loss": loss, "mlm_loss": loss, "tokens_per_second": 500.0, "mfu": 0.25}
    return {"kind": "step", "step": number, "tokens": tokens * number, **values, "time": NOW + at}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "parameters.json").write_text(json.dumps({"max_steps": 100}))
    return folder


@pytest.fixture
def held(run: Path) -> Iterator[Path]:
    """The run's folder while this process trains in it."""
    handle = lock_run(run / "run.lock")
    os.utime(run / "run.lock", (NOW - 1000, NOW - 1000))
    yield run
    os.close(handle)


def write(folder: Path, *records: dict[str, Any], end: str = "\n") -> None:
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + end)


def save(folder: Path, number: int, *, at: float, **facts: Any) -> None:
    checkpoint = folder / "checkpoints" / f"step-{number:08d}"
    checkpoint.mkdir()
    facts |= {"format": checkpoints.FORMAT, "step": number, "files": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(checkpoints.with_hash(facts)))
    os.utime(checkpoint / "manifest.json", (NOW + at, NOW + at))


def test_a_run_that_trains(held: Path) -> None:
    """10 steps in 20 s, then 5 s of silence: 50 steps are left, so 100 s - 5 s."""
    start = {"kind": "start", "step": 0, "max_steps": 100, "length_unit": "steps", "time": NOW - 500}
    steps = [step(number, at=2.0 * (number - 50), loss=3.0 - number / 100) for number in range(10, 51, 10)]
    check = {"kind": "validation", "step": 40, "store": "w/val", "loss": 2.75, "tokens": 40000, "time": NOW - 19}
    warning = {"kind": "warning", "text": "slow disk", "time": NOW - 19}
    write(held, start, *steps[:4], check, warning, *steps[4:], end='\n{"kind": "st')
    save(held, 30, at=-40)
    save(held, 40, at=-20)
    (held / "checkpoints" / ".staging-step-00000050").mkdir()
    status = run_status.read(held, now=NOW + 5)
    assert status.state == "training" and status.told == f"training: pid {os.getpid()} on {os.uname().nodename}"
    assert (status.step, status.max_steps, status.share_done, status.tokens) == (50, 100, 0.5, 50_000)
    assert status.loss == pytest.approx(2.5)
    assert (status.loss_change, status.loss_change_steps) == (pytest.approx(-0.2), 20), "of (30, 20) to (50, 40)"
    assert status.seconds_left == pytest.approx(50 * 2.0 - 5)
    assert [(check.store, check.step, check.values) for check in status.validations] == [("w/val", 40, {"loss": 2.75})]
    assert status.checkpoint == run_status.Checkpoint("step-00000040", 40, pytest.approx(25), 2)
    assert status.saving_step == 50 and status.warnings == ("slow disk",)
    assert status.problems == (), "a line that is being written is not a problem"
    assert status.values["mfu"] == 0.25 and status.seconds_since_word == pytest.approx(5)


def test_a_damaged_newest_checkpoint_is_a_problem(run: Path) -> None:
    write(run, {"kind": "start", "step": 0, "time": NOW}, {"kind": "finished", "step": 40, "time": NOW})
    save(run, 30, at=-40)
    folder = write_checkpoint(run, 40)
    assert run_status.read(run, now=NOW).problems == ()
    (folder / "state/optimizer-00000.safetensors").write_bytes(b"")
    problem = "step-00000040 is damaged: state/optimizer-00000.safetensors: 0 bytes, expected 50"
    assert run_status.read(run, now=NOW).problems == (problem,)
    (folder / "manifest.json").write_text('{"format": 3')
    assert "step-00000040 is damaged: " in run_status.read(run, now=NOW).problems[0]
    (folder / "manifest.json").unlink()
    assert "manifest.json: not a checkpoint's manifest" in run_status.read(run, now=NOW).problems[0]
    write_manifest(folder, 40, format=checkpoints.FORMAT + 1)
    assert "of a newer version of terakoya" in run_status.read(run, now=NOW).problems[0]


def test_a_run_that_writes_nothing_for_long_is_quiet(held: Path) -> None:
    write(held, {"kind": "start", "step": 0, "time": NOW - 500}, *(step(n, at=2.0 * (n - 50)) for n in (30, 40, 50)))
    assert "quiet" not in run_status.read(held, now=NOW + 190).told
    told = run_status.read(held, now=NOW + 210).told
    assert told.startswith("training, but quiet: nothing was written for 4 min, a step was logged every 20 s")


def test_a_run_with_limits_in_tokens_and_minutes(held: Path) -> None:
    (held / "parameters.json").write_text(json.dumps({"max_steps": None, "max_tokens": 100_000, "max_minutes": 20.0}))
    start = {"kind": "start", "step": 0, "max_steps": 77, "max_tokens": 100_000, "length_unit": "tokens"}
    write(held, {**start, "time": NOW - 500}, *(step(number, at=2.0 * (number - 50)) for number in (40, 50)))
    status = run_status.read(held, now=NOW)
    assert (status.max_steps, status.max_tokens, status.share_done) == (None, 100_000, 0.5)
    assert status.seconds_left == pytest.approx(100.0) and status.seconds_to_limit == pytest.approx(200.0)


def test_a_run_that_starts_again_after_a_stop(held: Path) -> None:
    stopped = {"kind": "stopped", "step": 50, "reason": "SIGTERM", "time": NOW - 1500}
    write(held, {"kind": "start", "step": 0, "time": NOW - 2000}, step(50, at=-1600), stopped)
    status = run_status.read(held, now=NOW)
    assert status.state == "starting" and status.step == 50
    assert status.seconds_left is None


def test_a_resumed_run_drops_the_steps_that_it_repeats(run: Path) -> None:
    checks = [{"kind": "validation", "step": number, "store": "v", "loss": float(number)} for number in (10, 30)]
    resume = {"kind": "resume", "step": 20, "time": NOW}
    write(run, step(10, at=-9), checks[0], step(20, at=-8), step(30, at=-7), checks[1], resume, step(21, at=1))
    status = run_status.read(run, now=NOW)
    assert status.step == 21 and status.restarts == 1
    assert [check.step for check in status.validations] == [10]


@pytest.mark.parametrize(
    ("record", "state", "told"),
    [
        ({"kind": "finished", "step": 100, "reason": None}, "finished", "finished"),
        (
            {"kind": "stopped", "step": 60, "reason": "SIGTERM"},
            "stopped",
            "stopped by SIGTERM; the same command continues the run",
        ),
        ({"kind": "error", "step": 60, "text": "disk full"}, "failed", "failed: disk full"),
    ],
)
def test_how_a_run_ended(run: Path, record: dict[str, Any], state: str, told: str) -> None:
    os.close(lock_run(run / "run.lock"))
    write(run, {"kind": "start", "step": 0, "time": NOW - 500}, step(50, at=-10), {**record, "time": NOW})
    status = run_status.read(run, now=NOW + 60)
    assert (status.state, status.told) == (state, told)
    assert status.process is None and status.seconds_left is None
    assert status.step == (record["step"] if record["kind"] != "error" else 50)


FINISHED = [{"kind": "start", "step": 0}, step(100, at=-90), {"kind": "finished", "step": 100, "time": NOW - 80}]
AGAIN = [{"kind": "resume", "step": 100, "time": NOW}, {"kind": "start", "step": 100, "time": NOW}]
END = {"kind": "finished", "step": 100, "time": NOW}
REFUSED = {"kind": "error", "step": 0, "text": "other values", "time": NOW}
CHECK = {"kind": "validation", "step": 100, "store": "v", "loss": 1.0, "time": NOW}
REFUSAL = "a start after the end was refused: other values"


@pytest.mark.parametrize(
    ("later", "state", "restarts", "age", "warnings"),
    [
        ([*AGAIN, CHECK, END], "finished", 0, 80.0, ()),
        ([*AGAIN, END, REFUSED, *AGAIN, END], "finished", 0, 0.0, (REFUSAL,)),
        ([*AGAIN, step(101, at=0), {**END, "step": 101}], "finished", 1, 0.0, ()),
        ([*AGAIN, {**END, "step": 101}], "finished", 1, 0.0, ()),
        ([*AGAIN, {**REFUSED, "step": 100}], "failed", 1, 0.0, ()),
        ([*AGAIN, {"kind": "stopped", "step": 100, "time": NOW}, REFUSED], "failed", 1, 0.0, ()),
        (AGAIN, "killed", 1, 0.0, ()),
    ],
)
def test_a_finished_run_stays_finished_until_it_trains_more(
    later: list[dict[str, Any]], state: str, restarts: int, age: float, warnings: tuple[str, ...], run: Path
) -> None:
    os.close(lock_run(run / "run.lock"))
    write(run, *FINISHED, *later)
    status = run_status.read(run, now=NOW)
    assert (status.state, status.restarts, status.warnings) == (state, restarts, warnings)
    assert status.seconds_since_word == age


def test_a_killed_run_and_one_that_never_started(run: Path) -> None:
    assert run_status.read(run, now=NOW).state == "not started"
    os.close(lock_run(run / "run.lock"))
    write(run, {"kind": "start", "step": 0, "time": NOW - 500}, step(50, at=-10), end='\n{"kind"')
    status = run_status.read(run, now=NOW)
    assert status.state == "killed" and f"pid {os.getpid()}" in status.told
    assert status.problems == ("the last line of metrics.jsonl is truncated",)
    with pytest.raises(UserError, match="expected the folder of a run"):
        run_status.read(run.parent)


def test_a_run_without_a_start_record_takes_its_length_from_the_checkpoint(run: Path) -> None:
    (run / "parameters.json").write_text(json.dumps({"epochs": 2.0}))
    write(run, step(50, at=-10))
    assert run_status.read(run, now=NOW).max_steps is None
    save(run, 50, at=0, max_steps=400)
    assert run_status.read(run, now=NOW).max_steps == 400
    start = {"kind": "start", "step": 50, "max_steps": 800, "length_unit": "steps", "time": NOW - 5}
    write(run, step(50, at=-10), start)
    assert run_status.read(run, now=NOW).max_steps == 800, "that of a run made longer, before its next checkpoint"


def test_reading_the_lock_neither_takes_nor_disturbs_it(run: Path) -> None:
    assert run_files.read_lock(run) == run_files.Lock(False, "", None)
    handle = lock_run(run / "run.lock")
    assert run_files.read_lock(run).held
    with pytest.raises(UserError, match="is in use by pid"):
        lock_run(run / "run.lock")
    os.close(handle)
    assert not run_files.read_lock(run).held
    looking = os.open(run / "run.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Thread(target=lambda: (time.sleep(0.03), os.close(looking))).start()
    os.close(lock_run(run / "run.lock"))  # while another process reads the lock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.4, "3 s"), (99, "99 s"), (120, "2 min"), (5999, "1 h 40 min"), (12_000, "3 h 20 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert run_status.format_duration(seconds) == text


def test_spikes_and_skipped_steps_are_counted_once(run: Path) -> None:
    """A resumed run finds those after its checkpoint again, and may repeat the record of one before."""
    spike = {"kind": "spike", "signal": "loss", "text": "the loss 9 is a spike", "time": NOW}
    skipped = {"kind": "skipped", "text": "not finite", "time": NOW}
    write(
        run, {**spike, "step": 1_200}, {**spike, "step": 1_200, "signal": "grad_norm"}, {**skipped, "step": 1_300},
        {**skipped, "step": 1_400}, {"kind": "resume", "step": 1_300, "time": NOW}, {**skipped, "step": 1_300},
    )  # fmt: skip
    status = run_status.read(run, now=NOW)
    assert (status.spikes, status.skipped_steps) == (2, 1)
    assert status.last_spike == "step 1,200: the loss 9 is a spike"
    assert status.last_skipped == "step 1,300: not finite"
    with StringIO() as text:
        Console(file=text, width=100).print(render([status]))
        assert "1, the last in step 1,300: not finite" in text.getvalue()


def test_a_run_that_an_event_plugin_ended_says_why(run: Path) -> None:
    write(run, step(40, at=0), {"kind": "finished", "step": 40, "reason": "early_stopping: no better", "time": NOW})
    status = run_status.read(run, now=NOW + 10)
    assert (status.state, status.told) == ("finished", "finished early: early_stopping: no better")
