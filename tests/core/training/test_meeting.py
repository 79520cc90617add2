"""Processes that were given different things end before the first step, and say what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import toy
from small_store import rewrite_store_json

from terakoya.config.parameters import Parameters
from terakoya.distributed import agreement
from terakoya.distributed.topology import ProcessInfo
from terakoya.plugins import PLUGINS_VARIABLE, registry
from terakoya.rows.stores import Stores
from terakoya.training.start import meeting

HOSTS = ("a01", "a02")
SCHEDULE = """
from terakoya.components import Schedule
from terakoya.hookspecs import hookimpl


class Level(Schedule):
    def factor(self, progress):
        return {factor}


@hookimpl
def register_schedules():
    return {{"level": Level}}
"""


def start(
    settings: dict[str, Any], out: Path, *of_rank: Sequence[str], plugins: Sequence[Path] = ()
) -> list[toy.Process]:
    """Starts a process on each of two pretended hosts, with arguments of its own, and a plugin where there are some."""
    hosts: list[dict[str, str]] = [{"TERAKOYA_HOST": host} for host in HOSTS]
    for environment, plugin in zip(hosts, plugins, strict=False):
        environment[PLUGINS_VARIABLE] = str(plugin)
    return toy.start(settings, out, nodes=(1, 1), environment_of_rank=hosts, arguments_of_rank=of_rank)


def refused(settings: dict[str, Any], out: Path, *of_rank: Sequence[str], plugins: Sequence[Path] = ()) -> list[str]:
    """What two processes print that end with 2, and both say the same."""
    started = start(settings, out, *of_rank, plugins=plugins)
    toy.finish(started, code=2)
    said = [each.output.read_text().partition("error: ")[2] for each in started]
    assert said[0] == said[1]
    return said[0].splitlines()


def two(store: Path, **changes: Any) -> dict[str, Any]:
    return toy.parameters(store, **{"batch_size": {"0": 9, "1": 7}, **changes})


ENGINE = next(each.sha256() or "" for each in registry().plugins if each.name == "terakoya_parallel")[:16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (["optimizer.learning_rate=0.5", "seed=7"],
         ["  optimizer.learning_rate: 0.005 on rank 0 (a01), 0.5 on rank 1 (a02)",
          "  seed: 42 on rank 0 (a01), 7 on rank 1 (a02)"]),
        pytest.param(["max_steps=9", "checkpoint.save_steps=4", "logging_steps=3"],
         ["  max_steps: 12 on rank 0 (a01), 9 on rank 1 (a02)",
          "  checkpoint.save_steps: 5 on rank 0 (a01), 4 on rank 1 (a02)",
          "  logging_steps: 1 on rank 0 (a01), 3 on rank 1 (a02)"], marks=pytest.mark.nightly),
        pytest.param(["parallel.engine=fsdp", "parallel.tp_size=2"],
         ['  parallel.engine: "ddp" on rank 0 (a01), "fsdp" on rank 1 (a02)',
          "  parallel.tp_size: 1 on rank 0 (a01), 2 on rank 1 (a02)",
          f'  SHA-256 of plugin terakoya_parallel: nothing on rank 0 (a01), "{ENGINE}" on rank 1 (a02)'],
                     marks=pytest.mark.nightly),
        pytest.param(["parallel.engine=deepspeed", "parallel.zero_stage=1"],
         ['  parallel.engine: "ddp" on rank 0 (a01), "deepspeed" on rank 1 (a02)',
          "  parallel.zero_stage: null on rank 0 (a01), 1 on rank 1 (a02)",
          f'  SHA-256 of plugin terakoya_parallel: nothing on rank 0 (a01), "{ENGINE}" on rank 1 (a02)'],
                     marks=pytest.mark.nightly),
    ],
    ids=["numbers", "lengths", "fsdp", "deepspeed"],
)  # fmt: skip
def test_other_parameters_on_a_node_end_all_before_anything_is_written(
    changes: list[str], lines: list[str], store: Path, tmp_path: Path
) -> None:
    said = refused(two(store), tmp_path / "run", [], [word for each in changes for word in ("--set", each)])
    assert said[0] == "the processes of the run were given different things:"
    assert said[1:-1] == lines
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_resume_with_other_parameters_on_a_node_does_not_offer_to_allow_them(store: Path, tmp_path: Path) -> None:
    toy.finish(start(two(store, max_steps=5), tmp_path / "run"))
    longer = two(store, max_steps=6)
    said = refused(longer, tmp_path / "run", [], ["--set", "optimizer.learning_rate=0.5"])
    assert said[1] == "  optimizer.learning_rate: 0.005 on rank 0 (a01), 0.5 on rank 1 (a02)"
    assert not any("--allow-change" in line for line in said)
    changed = ["--set", "optimizer.learning_rate=0.5"]
    said = refused(longer, tmp_path / "run", changed, changed)  # both have it, so the run may go on with it
    assert "--allow-change optimizer.learning_rate" in " ".join(said)
    toy.finish(start(longer, tmp_path / "run", [*changed, "--allow-change", "optimizer.learning_rate"], changed))


@pytest.mark.nightly
def test_stores_may_lie_elsewhere_on_a_node_but_must_hold_the_same(
    store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """Also when the run goes on, whose manifest has the places of rank 0."""
    copies = {"train": store, "held": validation_store}
    for name, original in copies.items():
        shutil.copytree(original, tmp_path / name)
    settings = two(store, max_steps=3) | {"evaluation": {"steps": 3, "batches": 1}}
    data = {"train": [str(store)], "validation": [str(validation_store)], "sequence_length": 32}
    there = [f'data.train=["{tmp_path}/train"]', f'data.validation=["{tmp_path}/held"]']
    other = [word for each in there for word in ("--set", each)]
    toy.finish(start({**settings, "data": data}, tmp_path / "run", [], other))
    straight = toy.losses(tmp_path / "run")
    toy.finish(start({**settings, "data": data}, tmp_path / "same"))
    assert toy.losses(tmp_path / "same") == straight
    toy.finish(start({**settings, "data": data, "max_steps": 4}, tmp_path / "run", [], other))

    shutil.rmtree(tmp_path / "train")
    shutil.copytree(validation_store, tmp_path / "train")
    (tokenizer,) = refused({**settings, "data": data}, tmp_path / "new", [], other)[1:-1]
    hashes = [json.loads((each / "store.json").read_text())["fingerprint"][:16] for each in (store, validation_store)]
    assert tokenizer == (
        f'  fingerprint of data.train.0.store: "{hashes[0]}" on rank 0 (a01), "{hashes[1]}" on rank 1 (a02)'
    )


@pytest.mark.slow
def test_a_store_that_one_node_lacks_ends_all_and_a_node_that_never_comes_is_waited_for_in_words(
    store: Path, tmp_path: Path
) -> None:
    gone = ["--set", f'data.train=["{tmp_path}/gone"]']
    (said,) = refused(two(store), tmp_path / "run", [], gone)
    there = f"{tmp_path}/gone: expected a finished token store, got no such folder"
    assert said.startswith(f"the start failed on 1 of 2 processes; rank 1 on a02: {there}")
    (said,) = refused(two(store), tmp_path / "run", gone, gone)
    assert said.startswith(there), "as if each were alone"
    started = start(two(store, parallel={"timeout_seconds": 5}), tmp_path / "run", [], ["--set", "unknown=1"])
    assert "not all 2 processes have connected within 5 s" in toy.finish(started, code=None)
    assert [each.process.exitcode for each in started] == [76, 2]


@pytest.mark.nightly
def test_another_version_of_a_plugin_on_a_node_is_named(store: Path, tmp_path: Path) -> None:
    files = [tmp_path / host / "level.py" for host in HOSTS]
    for number, file in enumerate(files, start=1):
        file.parent.mkdir()
        file.write_text(SCHEDULE.format(factor=number))
    settings = two(store, schedule={"type": "level"}, max_steps=1)
    (said,) = refused(settings, tmp_path / "run", plugins=files)[1:-1]
    assert said.startswith('  SHA-256 of plugin level: "')
    files[1].write_text(SCHEDULE.format(factor=1))
    toy.finish(start(settings, tmp_path / "run", plugins=files))


def differences(first: dict[str, Any], other: dict[str, Any]) -> str:
    assert (agreement.digest(first) == agreement.digest(other)) == (first == other)
    return agreement.describe_differences([first, other], [ProcessInfo(n, n, 0, host) for n, host in enumerate(HOSTS)])


@pytest.fixture
def given(store: Path) -> dict[str, Any]:
    parameters = Parameters.from_dict(two(store), source="test")
    return meeting.describe_given(parameters, Stores.open(parameters.data))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"objective": {"type": "masked_lm", "mlm_probability": 0.5}}, "objective.mlm_probability"),
        ({"batch_size": {"0": 8, "1": 8}}, "batch_size.0"),
        ({"micro_batch_size": None}, "micro_batch_size"),
        ({"profile": {"steps": [1, 2]}}, "profile"),
        ({"events": {"ema": {"decay": 0.9}}}, "events.ema.decay"),
        ({"start_from": "there"}, "start_from.new_heads"),
        ({"phases": [{"steps": 6, "objective": {"mlm_probability": 0.3}}, {}]}, "phases.0.steps"),
        ({"trackers": [{"type": "tensorboard"}]}, None),
        ({"parallel": {"nccl": {"debug": "INFO", "flight_recorder": 100}}}, None),
    ],
)
def test_every_parameter_is_compared_but_those_of_one_machine(
    changes: dict[str, Any], key: str | None, given: dict[str, Any], store: Path
) -> None:
    parameters = Parameters.from_dict({**two(store), **changes}, source="test")
    said = differences(given, meeting.describe_given(parameters, Stores.open(parameters.data)))
    assert f"  {key}: " in said if key is not None else not said


def test_another_tokenizer_and_other_versions_and_code_are_compared(
    given: dict[str, Any], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store, tmp_path / "store")
    facts = json.loads((store / "store.json").read_text())
    files = {name: {**each, "sha256": "0" * 64} if name.startswith("tokenizer/") else each
             for name, each in facts["files"].items()}  # fmt: skip
    rewrite_store_json(tmp_path / "store", files=files)
    parameters = Parameters.from_dict(two(store), source="test")
    monkeypatch.setattr("terakoya.store.token_store.check_tokenizer", lambda *_: None)
    stores = Stores.open(Parameters.from_dict(two(tmp_path / "store"), source="test").data)
    assert "  tokenizer of the stores: " in differences(given, meeting.describe_given(parameters, stores))

    stores = Stores.open(parameters.data)
    versions = {**meeting.package_versions(), "torch": "1.0", "tokenizers": "0.1"}
    monkeypatch.setattr(meeting, "package_versions", lambda: versions)
    said = differences(given, meeting.describe_given(parameters, stores))
    assert '  version of torch: "' in said and 'on rank 0 (a01), "1.0" on rank 1 (a02)' in said
    assert "version of tokenizers" not in said, "training encodes no text"
    monkeypatch.undo()

    changed = {**given, "SHA-256 of terakoya/training/loss.py": "0"}
    assert given.keys() == changed.keys() and "  SHA-256 of terakoya/training/loss.py: " in differences(given, changed)
    built = dict.fromkeys(meeting.package_versions(), "2.9.1+cu128")
    monkeypatch.setattr(meeting, "package_versions", lambda: built)
    here = meeting.describe_given(parameters, stores)
    built = dict.fromkeys(built, "2.9.1+cu130")
    assert not differences(here, meeting.describe_given(parameters, stores)), "a build for other hardware"


def test_many_differences_on_many_ranks_are_counted() -> None:
    processes = [ProcessInfo(rank, rank, 0, f"a{rank}") for rank in range(4)]
    numbers = {f"key{number}": 1 for number in range(7)}
    others = dict.fromkeys(numbers, 2)
    text = agreement.describe_differences([numbers, numbers, others, {**others, "more": None}], processes)
    lines = text.splitlines()
    assert lines[0] == "  key0: 1 on rank 0 (a0), 2 on rank 2 (a2) and 1 more ranks"
    assert lines[5:] == ["  and 3 more"]
    text = agreement.describe_differences([{"key": 1}, {}, {"key": 1}, {"key": 1}], processes)
    assert text == "  key: 1 on rank 0 (a0), nothing on rank 1 (a1)"
