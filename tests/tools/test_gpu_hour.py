"""tools/gpu/hour.py runs at toy size on a CPU: every stage, each measurement kept at once, a stage that hangs ended."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

GPU = Path(__file__).resolve().parents[2] / "tools" / "gpu"
sys.path[:0] = [str(GPU), str(GPU.with_name("bench"))]
import stages  # noqa: E402

STARTS_PROCESSES = {"facts", "command", "graphs"}
RATES = {each.name for each in stages.STAGES if each.part != "A" and each.name != "profiles"}
# torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def hour() -> ModuleType:
    return importlib.import_module("hour")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the stores, which all stages read."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def measure(stage: Any, hour: ModuleType, work: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """What the stage measures at toy size, in this process."""
    out = tmp_path / "results" / "toy"
    out.mkdir(parents=True)
    hour.run_stage(stage, hour.Settings(out, work, True, apart=False))
    found = [json.loads(line) for line in (out / "hour.jsonl").read_text().splitlines()]
    measured = importlib.import_module("measured")
    lines = measured.section(out.parent, "en").count(f"\n| {stage.part} | {stage.name} | ")
    assert lines == len(measured.measurements(out / "hour.jsonl"))  # each case has a line in the page
    assert found and not any(each.get("error") for each in found)
    assert all(each["stage"] == stage.name and each["torch"] and each["device"] == "cpu" for each in found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda each: f"{each.part}-{each.name}")
def test_a_stage_runs_at_toy_size(
    stage: Any, hour: ModuleType, work: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if stage.name in STARTS_PROCESSES:
        request.getfixturevalue("forks")
    found = measure(stage, hour, work, tmp_path)
    if stage.name in RATES:
        seen = [each for each in found if "refused" not in each and "extrapolated" not in each]
        assert all(each["tokens_per_second"] > 0 and 0 < each["product_share"] < 1 for each in seen)
        assert {each["variant"] for each in found if "refused" in each} <= {"fp8"}
    check = CHECKS.get(stage.name)
    if check is not None:
        check(found)


def check_command(found: list[dict[str, Any]]) -> None:
    assert [each["what"] for each in found[:3]] == ["SIGTERM", "20 steps", "resumed"]
    assert all(each["same_bits"] for each in found[2:])


def check_parity(found: list[dict[str, Any]]) -> None:
    exact = [each for each in found if each["precision"] == "fp32" and not each["compiled"]]
    assert len(exact) == 6 and all(each["gradient_error"] == 0.0 for each in exact)  # the device is the CPU itself
    assert sum(each["compiled"] for each in found) == 6
    assert all(each["close"] and each["same_bits_twice"] for each in found)


def check_padded(found: list[dict[str, Any]]) -> None:
    assert len(found) == 8 and all(each["finite"] for each in found)
    exact = [each for each in found if each["precision"] == "fp32"]
    assert all(each["loss_error"] == each["gradient_error"] == 0.0 for each in exact)  # the device is the CPU itself
    assert all(0 < each["gradient_error"] < 0.1 for each in found if each["precision"] == "bf16")


def check_waits(found: list[dict[str, Any]]) -> None:
    assert {"adamw", "stable_adamw", "lion", "muon", "adafactor"} < {each["optimizer"] for each in found}


def check_memory(found: list[dict[str, Any]]) -> None:
    assert "out of memory" in found[-1]["advice"] and "terakoya estimate" in found[-1]["advice"]


def check_precisions(found: list[dict[str, Any]]) -> None:
    assert [each["precision"] for each in found if "last" in each] == [
        "fp32", "tf32", "bf16", "bf16, not compiled", "fp16"
    ]  # fmt: skip
    assert "fp8" in found[-1]["refused"]


def check_fused(found: list[dict[str, Any]]) -> None:
    blocks = [each for each in found if each["what"] == "block"]
    assert [each["variant"] for each in blocks] == ["plain", *["fused"] * found[0]["right"]]
    assert all(each["gradient_error"] < 0.02 and each["same_bits_twice"] for each in blocks)


def check_llama(found: list[dict[str, Any]]) -> None:
    assert [each["layers"] for each in found] == [2, 2, 6, 6, 32, 32]
    assert found[-1]["ours_over_this"] == pytest.approx(found[-2]["tokens_per_second"] / found[-1]["tokens_per_second"])


CHECKS = {
    "command": check_command, "graphs": check_command, "parity": check_parity, "padded": check_padded,
    "waits": check_waits,
    "memory": check_memory, "precisions": check_precisions, "fused": check_fused, "llama_8b": check_llama,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["A", "B", "C"])
def test_a_part_runs_as_a_command(part: str, tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / "hour.py"), "--part", part, "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--minutes", "15"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert part == "A" or f"| {'GPT-2 124M' if part == 'C' else 'BERT-base'} | " in done.stdout


def test_a_part_without_time_says_which_stages_are_missing(
    hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--part", "A", "--tiny", "--out", str(tmp_path), "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", ["hour.py", *options])
    assert hour.main() == 1
    said = capsys.readouterr().err
    assert all(f"{name} (no time left)" in said for name in stages.of_part("A"))


def test_a_part_fits_its_minutes_and_leaves_what_a_stage_does_not_need_to_the_others(hour: ModuleType) -> None:
    for part in "ABC":
        assert sum(each.seconds for each in stages.of_part(part).values()) == 60 * 8.5
    first, second, third = (replace(stages.STAGES[0], seconds=seconds) for seconds in (100.0, 50.0, 50.0))
    assert hour.limit([first, second, third], 200.0) == 100.0
    assert hour.limit([first, second, third], 400.0) == 200.0  # twice the minutes
    assert hour.limit([second, third], 180.0) == 90.0  # the first took 20 of its 100 seconds
    assert hour.limit([first, second, third], 120.0) == 100.0  # what comes first keeps its time
    assert hour.limit([second, third], 20.0) == 20.0


def test_a_stage_that_hangs_is_ended_with_its_processes(hour: ModuleType, tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"sleep 60 & echo $! > {child}; wait"
    assert hour.run_process(["sh", "-c", program], tmp_path / "log", 0.5) is None
    process = Path(f"/proc/{child.read_text().strip()}")
    end = time.monotonic() + 5
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2] and time.monotonic() < end:
        time.sleep(0.01)
    assert not process.exists() or (process / "stat").read_text().split()[2] == "Z"
    assert hour.run_process(["sh", "-c", "exit 3"], tmp_path / "log", 5.0) == 3


def test_the_readme_has_a_line_for_each_stage() -> None:
    text = (GPU / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 4]
    assert rows[1:] == [f"| {each.part} | `{each.name}` | {each.question} |" for each in stages.STAGES]


def test_without_a_gpu_it_says_so(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hour.py", "--part", "A", "--out", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hour.main() == 2


def test_stages_that_only_warm_up_measure_nothing(
    hour: ModuleType, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[list[str]] = []
    rates = importlib.import_module("rates")
    monkeypatch.setattr(rates, "warm_up", lambda sides, seconds: warmed.append(list(sides)))
    settings = hour.Settings(tmp_path, work, True, seconds=7.0, warm=True)
    warming = [stage for stage in stages.STAGES if stages.warms(stage)]
    assert {stage.name for stage in warming} == RATES - {"llama_8b_whole"}
    assert all(list(stage.run(settings)) == [] for stage in warming)
    assert len(warmed) == len(warming) + 1  # two depths of Llama-8B
    assert warmed[0] == ["as shipped", "Trainer, compiled, same rows"] and ["0", "1", "2", "3"] in warmed


@pytest.mark.parametrize("code", [0, 1])
def test_stages_warm_up_each_in_a_process(
    code: int, hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(hour, "run_process", lambda command, log, seconds: started.append(command) or code)
    options = ["--part", "B", "--tiny", "--warm", "--only", "bert_ja,profiles,algorithms", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["hour.py", *options])
    assert hour.main() == code
    assert sorted(command[command.index("--stage") + 1] for command in started) == ["algorithms", "bert_ja"]
    assert all("--warm" in command for command in started)


def test_a_stage_that_does_not_exist_is_named(
    hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hour.py", "--part", "B", "--tiny", "--only", "bert_bse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--only bert_bse: part B has bert_base, bert_large"):
        hour.main()


def test_without_git_the_commit_is_not_known(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hour, "ROOT", tmp_path)
    assert hour.where.__wrapped__()["commit"] == ""


def test_a_way_that_fails_leaves_the_others_alone(
    hour: ModuleType, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correctness = importlib.import_module("correctness")

    class Problem:
        loss, gradient = 2.0, torch.ones(1)

        def solve(self, settings: Any, way: Any) -> Any:
            if way == correctness.EXACT:
                raise ValueError("no kernel")
            return 2.0, (torch.ones(1), torch.ones(1))

    monkeypatch.setattr(correctness, "PRESETS", ("bert_base",))
    monkeypatch.setattr(correctness.Problem, "of", lambda name, settings: Problem())
    monkeypatch.setattr(correctness, "take_deterministic", lambda settings: None)
    found = list(correctness.parity(hour.Settings(tmp_path, work, True)))
    assert found[0]["error"] == "ValueError: no kernel" and found[0]["precision"] == "fp32"
    assert [each["close"] for each in found[1:]] == [True, True]


def test_a_profiled_run_ends_before_its_last_step(
    hour: ModuleType, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from terakoya.errors import UserError

    rates, ours = importlib.import_module("rates"), importlib.import_module("ours")
    taken: list[int] = []

    def run(raw: Any, steps: int, clock: Any) -> None:
        try:
            for step in range(steps):
                taken.append(step)
                torch.ones(2).sum()
                clock.step_ended()
        except Exception as raised:
            clock.step_ended()  # of another run in this process
            raise UserError("an event of a plugin failed") from raised

    monkeypatch.setattr(ours, "run", run)
    case = stages.Case("bert_base", rows=4)
    (found,) = rates.profiles(hour.Settings(tmp_path, work, True), cases=[("plain", case)])
    assert found["kernels_per_step"] > 0 and len(taken) == 1 + rates.PROFILED
