"""tools/gpu/hour.py runs at toy size on a CPU: stages of every kind, each measurement kept at once, none that hangs."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import toy

GPU = Path(__file__).resolve().parents[2] / "tools" / "gpu"
sys.path[:0] = [str(GPU), str(GPU.with_name("bench"))]
import correctness  # noqa: E402
import kernel_times  # noqa: E402
import processes  # noqa: E402
import settings as shared  # noqa: E402
import stages  # noqa: E402

STARTS_PROCESSES = {"command", "graphs"}
ALL = [(part, each) for part, of_part in stages.PARTS.items() for each in of_part]
CASES = {each.name: each for _, each in ALL if isinstance(each.run, partial)}
# torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def kind(stage: Any) -> tuple[str, ...]:
    """What is tried once: a stage that is no rate, our rate of each preset, a profile, a peer of each objective."""
    if not isinstance(stage.run, partial):
        return (stage.name,)
    case, function = stage.run.keywords["case"], stage.run.func.__name__
    which = {"rate": case.preset, "beside_trainer": case.shipped["objective"]["type"]}
    return function, which.get(function, "")


TRIED = {kind(each): (part, each) for part, each in reversed(ALL)}
EVERY_TIME = {("rate", "bert_base"), ("memory",)}
"""Stages of the kinds that are quick; at night all are tried."""


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


def asked(out: Path, part: str = "A", **further: Any) -> argparse.Namespace:
    """The arguments of the command."""
    return argparse.Namespace(**{"part": part, "minutes": None, "out": out, "tiny": True, "only": [], **further})


def kept(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "hour.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        pytest.param(*tried, id="-".join(each), marks=[] if each in EVERY_TIME else [pytest.mark.nightly])
        for each, tried in TRIED.items()
    ],
)
def test_a_stage_runs_at_toy_size(
    part: str, stage: Any, hour: ModuleType, work: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if stage.name in STARTS_PROCESSES:
        request.getfixturevalue("forks")
    out = tmp_path / "results" / "toy"
    out.mkdir(parents=True)
    assert hour.run_stage(asked(out, part), stage, hour_settings(out, work)) == ""
    found = kept(out)
    measured = importlib.import_module("measured")
    lines = measured.section(out.parent, "en").count(f"\n| {part} | {stage.name} | ")
    assert lines == len(measured.measurements(out / "hour.jsonl"))  # each case has a line in the page
    assert found and not any(each.get("error") for each in found)
    assert all(each["stage"] == stage.name and each["torch"] and each["device"] == "cpu" for each in found)
    rates = [each for each in found if "tokens_per_second" in each and "variant" in each]
    # of a product so small that its own rate is what a busy machine makes of it
    assert all(each["tokens_per_second"] > 0 and each["product_share"] > 0 for each in rates)
    assert all("gpu_waits" in each for each in rates if "extrapolated" not in each)
    check = CHECKS.get(stage.name)
    if check is not None:
        check(found)


def hour_settings(out: Path, work: Path) -> Any:
    return shared.Settings(out, work, True, apart=False)


def check_command(found: list[dict[str, Any]]) -> None:
    assert [each["what"] for each in found[:3]] == ["SIGTERM", "20 steps", "resumed"]
    assert all(each["same_bits"] for each in found[2:])


def check_parity(found: list[dict[str, Any]]) -> None:
    exact = [each for each in found if each["precision"] == "fp32" and not each["compiled"]]
    assert len(exact) == len(correctness.PRESETS) and all(
        each["gradient_error"] == 0.0 for each in exact
    )  # the device is the CPU itself
    assert sum(each["compiled"] for each in found) == len(correctness.PRESETS)
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
    assert [each["layers"] for each in found] == [2, 6, 32]
    few, more, whole = (1 / each["tokens_per_second"] for each in found)
    assert whole == pytest.approx(few + 30 / 4 * (more - few))


def check_trainer(found: list[dict[str, Any]]) -> None:
    assert [each["variant"] for each in found] == [
        "micro-steps 1", "Trainer, compiled, same rows", "Trainer, compiled, same documents padded"
    ]  # fmt: skip
    assert found[1]["ours_over_this"] == pytest.approx(found[0]["tokens_per_second"] / found[1]["tokens_per_second"])


def check_attention(found: list[dict[str, Any]]) -> None:
    assert {each["kernel"] for each in found} == {"sdpa, masked"}  # a CPU has no flash attention
    assert len(found) == 10 and found[-1]["documents_in_rows"] == 1


CHECKS = {
    "command": check_command, "graphs": check_command, "parity": check_parity, "padded": check_padded,
    "waits": check_waits, "memory": check_memory, "precisions": check_precisions, "fused": check_fused,
    "llama_8b": check_llama, "bert_base beside Trainer": check_trainer, "attention": check_attention,
}  # fmt: skip


def test_every_case_is_accepted_at_its_own_size_and_has_a_name_of_its_own(store: Path, tmp_path: Path) -> None:
    from terakoya.config.parameters import Parameters

    full = shared.Settings(tmp_path, tmp_path, tiny=False, store=store)
    for each in CASES.values():
        case = each.run.keywords["case"]
        if case.vocabulary == shared.VOCABULARY_SIZE:
            Parameters.from_dict(case.parameters(full), source=each.name)
    for of_part in stages.PARTS.values():
        names = [each.name for each in of_part]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("preset", ["bert_large", "electra_small", "gpt2_125m", "llama_8b"])
def test_as_shipped_is_the_preset_as_it_is(preset: str, store: Path, tmp_path: Path) -> None:
    full = shared.Settings(tmp_path, tmp_path, tiny=False, store=store)
    case = shared.Case(preset)
    raw, seen = dict(case.shipped), case.parameters(full)
    not_measured = {
        "_comment", "data", "schedule", "max_steps", "evaluation", "checkpoint", "logging_steps", "trackers", "seed"
    }  # fmt: skip
    assert {key: seen.get(key) for key in raw.keys() - not_measured} == {
        key: raw[key] for key in raw.keys() - not_measured
    }
    assert seen["data"]["sequence_length"] == raw["data"]["sequence_length"] and case.label == "as shipped"


def test_the_name_of_a_case_says_how_it_differs_from_its_preset() -> None:
    assert shared.Case("bert_base", rows=32, micro_steps=8, length=512).label == "as shipped"
    case = shared.Case("bert_base", 64, 1, further={"cuda_graphs": False, "attention": "sdpa"})
    assert case.label == "rows 64, micro-steps 1, cuda_graphs false, attention sdpa"
    assert shared.Case("llama_8b", architecture={"num_hidden_layers": 2}).label == "num_hidden_layers 2"


def test_flash_is_timed_with_the_lengths_that_a_run_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terakoya.toolkit.architectures.attention import LONGEST_DOCUMENT, boundary_arrays

    given: list[tuple[Any, ...]] = []

    def varlen_attn(query: Any, key: Any, value: Any, *sizes: Any, window_size: Any) -> Any:
        given.append((*sizes, window_size))
        return query + key + value

    class OnCpu(shared.Settings):
        device = torch.device("cpu")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    raw = {"architecture": {"num_attention_heads": 2, "hidden_size": 8}, "objective": {"type": "causal_lm"}}
    ids = np.repeat([[0, 1, 2], [0, 1, 1]], 40, axis=1)
    settings = OnCpu(tmp_path, tmp_path, tiny=False)
    with importlib.import_module("terakoya.training.model.determinism").restore_choice():
        found = list(kernel_times.attention_to(settings, raw, {}, ids))
    assert [each["kernel"] for each in found[::2]] == ["sdpa, masked", "flash, room 5", "flash, room 64"]
    of_run = boundary_arrays(ids)
    for starts, same, longest, as_long, window in given:
        assert starts is same and longest == as_long == len(of_run[LONGEST_DOCUMENT]) == 120 and window == (-1, 0)
    assert given[-1][0].tolist() == of_run["cu_seqlens"].tolist() and given[0][0].tolist() == [0, 40, 80, 120, 160, 240]


def test_the_card_is_asked_for_its_products_once_a_call(work: Path, tmp_path: Path) -> None:
    first = kernel_times.product_rates(shared.Settings(tmp_path, work, tiny=True))
    assert kernel_times.product_rates(shared.Settings(tmp_path / "other", work, tiny=True)) == first


@pytest.mark.nightly
def test_a_part_runs_as_a_command(tmp_path: Path) -> None:
    part = min(stages.PARTS, key=lambda name: sum(each.seconds for each in stages.PARTS[name]))
    command = [sys.executable, str(GPU / "hour.py"), "--part", part, "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--minutes", "30"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| BERT-base | " in done.stdout
    assert {each["stage"] for each in kept(tmp_path)} == {each.name for each in stages.PARTS[part]}


def test_a_call_fits_its_minutes_and_both_a_quarter_of_an_hour_with_a_start(hour: ModuleType) -> None:
    imports = 45
    for part, of_part in stages.PARTS.items():
        assert sum(each.seconds for each in of_part) + imports <= 60 * hour.MINUTES[part], part
    assert hour.MINUTES["B"] <= 8 and hour.MINUTES["C"] <= 4
    goals = [case for each in stages.PARTS["B"][1:5] if (case := each.run.keywords["case"]).label == shared.SHIPPED]
    assert [each.preset for each in goals] == ["bert_base", "bert_large", "electra_small", "gpt2_125m"]


def stand_in(out: Path, pipe: Connection) -> None:
    """A process of stages, each of which writes down where it ran."""
    names = ["good", "fails", "hangs", "dies", "good again"]
    pipe.send([(name, 0.1) for name in names])
    while True:
        name = names[pipe.recv()]
        with (out / "ran").open("a") as lines:
            lines.write(f"{name} {os.getpid()}\n")
        if name == "hangs":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            (out / "child").write_text(str(child.pid))
            time.sleep(60)
        if name == "dies":
            os._exit(3)
        pipe.send("no memory" if name == "fails" else "")


@pytest.fixture
def forked(hour: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need no seconds for imports, and are not waited for long."""
    toy.start_fork_server()
    monkeypatch.setattr(processes, "START_METHOD", "forkserver")
    monkeypatch.setattr(hour, "LEAST", 2.0)


def test_a_stage_that_fails_hangs_or_dies_costs_no_other_one(hour: ModuleType, tmp_path: Path, forked: None) -> None:
    missing = hour.run_part(asked(tmp_path, tiny=False), stand_in, tmp_path)
    assert [each.split(":")[0] for each in missing] == ["fails", "hangs", "dies"]
    assert "no memory" in missing[0] and "more than 2 s" in missing[1] and "without a word" in missing[2]
    ran = dict(line.rsplit(" ", 1) for line in (tmp_path / "ran").read_text().splitlines())
    assert list(ran) == ["good", "fails", "hangs", "dies", "good again"]
    assert ran["good"] == ran["fails"] == ran["hangs"] and len(set(ran.values())) == 3
    assert [each["stage"] for each in kept(tmp_path)] == ["hangs", "dies"]  # the others keep their own
    assert not processes.runs(int((tmp_path / "child").read_text()))


def test_what_is_asked_for_runs_and_what_has_no_time_is_named(hour: ModuleType, tmp_path: Path, forked: None) -> None:
    assert hour.run_part(asked(tmp_path, only=["good"]), stand_in, tmp_path) == []
    assert [line.rsplit(" ", 1)[0] for line in (tmp_path / "ran").read_text().splitlines()] == ["good", "good again"]
    missing = hour.run_part(asked(tmp_path, minutes=0.0, only=["dies", "hangs"]), stand_in, tmp_path)
    assert missing == ["hangs: left out, as 0 s were left", "dies: left out, as 0 s were left"]
    assert [each["left_out"] for each in kept(tmp_path)] == ["0 s left"] * 2
    assert importlib.import_module("measured").measurements(tmp_path / "hour.jsonl") == []
    with pytest.raises(LookupError, match=r"(?s)no stage has goood in its name.*hangs\n"):
        hour.run_part(asked(tmp_path, only=["goood"]), stand_in, tmp_path)


def test_a_stage_is_ended_after_three_times_its_seconds_or_when_the_call_ends(hour: ModuleType) -> None:
    assert (hour.limit(40, 500), hour.limit(5, 500), hour.limit(40, 50)) == (120, 60, 50)


def test_a_printed_line_says_its_rate_and_how_often_the_gpu_waited(hour: ModuleType) -> None:
    line = {"part": "B", "stage": "bert_base, as shipped", "preset": "bert_base", "variant": "as shipped", "time": 1}
    line |= {"tokens_per_second": 1234567.0, "gpu_waits": 0.5, "device": "cpu"}
    assert hour.shown(line) == "tokens_per_second 1,234,567  gpu_waits 0.5"
    assert hour.shown({**line, "variant": "Trainer"}).startswith("variant Trainer  tokens_per_second")


class Pipe:
    """The end of a pipe that a process of stages has."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.sent = list(numbers), list[Any]()

    def send(self, answer: Any) -> None:
        self.sent.append(answer)

    def recv(self) -> int:
        if not self.numbers:
            raise EOFError
        return self.numbers.pop(0)


def test_a_failed_stage_keeps_what_it_has_and_the_process_goes_on(
    hour: ModuleType, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(settings: Any) -> Iterator[dict[str, Any]]:
        torch.use_deterministic_algorithms(True)
        yield {"what": "before"}
        raise RuntimeError("no kernel image")

    def good(settings: Any) -> Iterator[dict[str, Any]]:
        yield {"what": torch.are_deterministic_algorithms_enabled()}

    parts = {"A": [shared.Stage("breaks", 1, breaks), shared.Stage("good", 2, good)]}
    monkeypatch.setattr(stages, "PARTS", parts)
    pipe = Pipe(0, 1)
    hour.serve(asked(tmp_path, store=None), work, pipe)
    assert pipe.sent == [[("breaks", 1), ("good", 2)], "RuntimeError: no kernel image", ""]
    found = kept(tmp_path)
    assert [each.get("what") for each in found] == ["before", None, False]  # its algorithms are not the next one's
    assert found[1]["error"] == "RuntimeError: no kernel image" and found[0]["documents"] == "random ids"
    assert "Traceback" in (tmp_path / "A.log").read_text()


def test_without_a_gpu_it_says_so(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pipe = Pipe()
    hour.serve(asked(tmp_path, tiny=False), tmp_path, pipe)
    assert "no CUDA device" in pipe.sent[0]
    monkeypatch.setattr(sys, "argv", ["hour.py", "--part", "B", "--out", str(tmp_path)])

    def refused(*_: Any) -> list[str]:
        raise LookupError(pipe.sent[0])

    monkeypatch.setattr(hour, "run_part", refused)
    assert hour.main() == 2
    monkeypatch.setattr(hour, "run_part", lambda *_: ["facts: left out"])
    assert hour.main() == 1


def test_the_readme_names_the_stages_of_part_a_and_those_that_decide() -> None:
    text = (GPU / "README.md").read_text()
    assert all(f"\n| `{each.name}` | " in text for each in stages.PARTS["A"])
    decided = text[text.index("| setting | stages | rule |") :].split("\n\n")[0].splitlines()[2:]
    named = {name for line in decided for name in line.split(" | ")[1].strip("`").split("`, `")}
    assert len(decided) == 4 and named <= {each.name for _, each in ALL}


def test_without_git_the_commit_is_not_known(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    assert hour.where.__wrapped__()["commit"] == ""


def test_a_way_that_fails_leaves_the_others_alone(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Problem:
        loss, gradient = 2.0, torch.ones(1)

        def solve(self, settings: Any, way: Any) -> Any:
            if way == correctness.EXACT:
                raise ValueError("no kernel")
            return 2.0, (torch.ones(1), torch.ones(1))

    monkeypatch.setattr(correctness, "PRESETS", ("bert_base",))
    monkeypatch.setattr(correctness.Problem, "of", lambda name, settings: Problem())
    monkeypatch.setattr(correctness.determinism, "choose", lambda deterministic: None)
    found = list(correctness.parity(hour_settings(tmp_path, work)))
    assert found[0]["error"] == "ValueError: no kernel" and found[0]["precision"] == "fp32"
    assert [each["close"] for each in found[1:]] == [True, True]


def test_a_profiled_run_ends_before_its_last_step(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (found,) = rates.profile(hour_settings(tmp_path, work), case=shared.Case("bert_base"))
    assert found["kernels_per_step"] > 0 and len(taken) == 1 + rates.PROFILED
