"""What a resumed run may change: a schedule that follows validation needs what it has followed so far."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.resuming import changes
from terakoya.training.setup import StartOptions, train_in_this_process

PLATEAU = {"type": "plateau", "patience": 1}
STORES = {"train": "a1", "held": "b2"}


def resume(
    before: dict[str, Any], now: dict[str, Any], stores: dict[str, str], allow: frozenset[str] = frozenset()
) -> list[str]:
    old, new = (
        Parameters.from_dict(toy.parameters(Path("train"), Path("held"), **changes), source="test")
        for changes in (before, now)
    )
    lines: list[str] = []
    manifest = {"parameters": old.dump(), "stores": STORES}
    warnings = changes.refuse_changes(Path("run"), manifest, new, stores, allow, lines.append)
    return lines + warnings


def held(name: str) -> dict[str, Any]:
    return {"data": {"train": ["train"], "validation": [name], "sequence_length": 32}}


@pytest.mark.parametrize(
    ("changes", "stores", "key"),
    [
        (held("other"), {"train": "a1", "other": "c3"}, "data.validation"),
        ({}, {"train": "a1", "held": "c3"}, "data.validation"),
        ({"evaluation": {"steps": 3, "batches": 2}}, STORES, "evaluation.steps"),
        ({"evaluation": {"steps": 6, "batches": 1}}, STORES, "evaluation.batches"),
    ],
    ids=["another store", "another content", "steps", "batches"],
)
def test_plateau_continues_only_with_the_validation_that_it_has_followed(
    changes: dict[str, Any], stores: dict[str, str], key: str
) -> None:
    with pytest.raises(UserError, match=f"other values of {key}; .* --allow-change {key}"):
        resume({"schedule": PLATEAU}, {"schedule": PLATEAU, **changes}, stores)
    resume({"schedule": PLATEAU}, {"schedule": PLATEAU, **changes}, stores, frozenset({key}))
    resume({}, changes, stores)  # a schedule that does not look at losses


def test_the_same_validation_store_in_another_place_is_no_change() -> None:
    plateau = {"schedule": PLATEAU}
    assert resume(plateau, {**plateau, **held("moved")}, {"train": "a1", "moved": "b2"})


def trained_on(*stores: str, **changes: Any) -> dict[str, Any]:
    return {"data": {"train": list(stores), "validation": ["held"], "sequence_length": 32}, **changes}


@pytest.mark.parametrize(
    ("changes", "contents", "keys"),
    [
        (trained_on("train"), {"train": "c3"}, ["data"]),
        (trained_on("other"), {"other": "c3"}, ["data"]),
        (trained_on("train", "other"), {"train": "a1", "other": "c3"}, ["data"]),
        (trained_on("moved"), {"moved": "a1"}, ["data.train.0.store"]),
        (trained_on("other", seed=7), {"other": "c3"}, ["data", "seed"]),
    ],
    ids=["another content", "another store", "one more store", "another place", "another store and seed"],
)
def test_the_first_message_names_all_that_lets_a_run_continue_with_other_stores(
    changes: dict[str, Any], contents: dict[str, str], keys: list[str]
) -> None:
    stores = {**contents, "held": "b2"}
    with pytest.raises(UserError) as refused:
        resume({}, changes, stores)
    assert re.findall(r"--allow-change (\S+)", str(refused.value)) == keys
    resume({}, changes, stores, frozenset(keys))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, []),
        ({"graphs": True}, {}, ["cuda_graphs was true, and is false: the steps from here on"]),
        ({}, {"graphs": True}, ["cuda_graphs was false, and is true: the steps from here on"]),
        # graphs are compiled whole, so one notice is enough where that is new
        ({"compile": "blocks"}, {"graphs": True}, ["compile was blocks, and is whole: the steps from here on are"]),
        ({"stream": True}, {}, ["bf16_stream was true, and is false: the steps from here on"]),
        ({"stream": True, "fused": True}, {}, ["bf16_stream was true, and is false: the steps from here on"]),
        ({}, {"deterministic": False}, ["deterministic was true, and is false: the steps from here on are rounded"]),
        ({"deterministic": False}, {}, ["deterministic was false, and is true: the steps from here on are rounded"]),
        # a GPU's sums in any order differ each time; runs of before the setting had them
        ({"device": "cuda"}, {"deterministic": False}, ["deterministic is false: the steps from here on are rounded"]),
        ({"fused": True}, {}, ["fused_kernels was true, and is false: the steps from here on"]),
        ({}, {"processor": "A (AVX2)"}, []),  # not known of older runs
        ({"processor": "A (AVX2)"}, {"processor": "B (AVX512)"}, ["processor was A (AVX2), and is B (AVX512)"]),
        ({"nccl": {}}, {"nccl": {}}, []),
        ({"nccl": {}}, {}, []),  # in one process nothing is summed
        (
            {"nccl": {"NCCL_ALGO": "^NVLS,NVLSTree"}},
            {"nccl": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}},
            ["nccl was NCCL_ALGO=^NVLS,NVLSTree, and is NCCL_ALGO=Ring NCCL_PROTO=Simple:"],
        ),
        (
            {"nccl": {}},
            {"nccl": {"NCCL_ALGO": "Ring"}},
            ["nccl was unset, and is NCCL_ALGO="],
        ),
    ],
)
def test_a_run_that_is_rounded_in_another_way_says_so(
    before: dict[str, Any], now: dict[str, Any], words: list[str]
) -> None:
    def world(start: dict[str, Any]) -> dict[str, Any]:
        names = {"bf16_stream": "stream", "fused_kernels": "fused", "cuda_graphs": "graphs"}
        further = {key: start[key] for key in ("device", "deterministic", "processor", "nccl") if key in start}
        flags = {key: start.get(name, False) for key, name in names.items()}
        return {"compile": start.get("compile", "whole"), **flags, **further}

    found = list(changes.other_rounding({"world": world(before)}, world(now)))
    assert [line[: len(start)] for line, start in zip(found, words, strict=True)] == words


@pytest.mark.slow
def test_a_resumed_run_logs_the_bits_of_all_text_since_the_last_record(
    store: Path, line_store: Path, tmp_path: Path
) -> None:
    """Also of that before the checkpoint, which is of another mixture here."""
    settings = toy.parameters(store, max_steps=6, logging_steps=6, checkpoint={"save_steps": 3})
    settings["data"]["stages"] = [{"from_step": 4, "train": [str(line_store)]}]

    def train(out: Path) -> float:
        train_in_this_process(Parameters.from_dict(settings, source="test"), out)
        return float(toy.records(out)[6]["masked_bits_per_character"])

    straight = train(tmp_path / "straight")
    middle = "checkpoints/step-00000003"
    shutil.copytree(tmp_path / "straight" / middle, tmp_path / "resumed" / middle)
    assert train(tmp_path / "resumed") == straight


@pytest.mark.slow
def test_a_store_that_another_mixture_moves_is_named(store: Path, line_store: Path, tmp_path: Path) -> None:
    """A mixture that begins with a stage moves none, nor does a store in another folder."""
    both = [{"store": str(store), "weight": 1.0}, {"store": str(line_store), "weight": 1.0}]
    settings = toy.parameters(store, max_steps=3, checkpoint={"save_steps": 3})
    settings["data"]["train"] = both

    def warnings(name: str, data: dict[str, Any]) -> list[str]:
        out = tmp_path / name
        if name != "run":
            shutil.copytree(tmp_path / "run/checkpoints", out / "checkpoints")
        changed = {**settings, "data": {**settings["data"], **data}, "max_steps": 3 if name == "run" else 4}
        parameters = Parameters.from_dict(changed, source="test")
        train_in_this_process(parameters, out, StartOptions(allow_change=frozenset({"data"})))
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        texts = [record["text"] for record in records if record["kind"] == "warning"]
        return [text for text in texts if "learning rate" not in text]

    assert warnings("run", {}) == []
    more = [{**both[0], "weight": 3.0}, both[1]]
    (text,) = warnings("changed", {"train": more})
    assert f"the next row of some stores: {store} 24 -> 36, {line_store} 24 -> 12. To go on" in text
    assert text.endswith("data.stages, or to a phase, from step 4 on")
    assert warnings("stage", {"stages": [{"from_step": 4, "train": more}]}) == []
    moved = shutil.copytree(store, tmp_path / "moved")
    assert warnings("moved", {"train": [{"store": str(moved), "weight": 1.0}, both[1]]}) == []


@pytest.mark.slow
def test_a_rate_that_a_change_moves_is_told_with_both_values(store: Path, tmp_path: Path) -> None:
    """From a checkpoint in the middle and from the last one; a schedule that goes on as it was is no change."""

    def train(name: str, steps: int, start: str = "", **schedule: Any) -> tuple[list[str], dict[int, float]]:
        settings = toy.parameters(store, max_steps=steps, checkpoint={"save_steps": 2, "keep": 9}, logging_steps=1)
        settings["schedule"] = {"type": "linear", "warmup_steps": 0, **schedule}
        out = tmp_path / name
        if start:
            shutil.copytree(tmp_path / start, out / "checkpoints" / Path(start).name)
        train_in_this_process(
            Parameters.from_dict(settings, source="test"), out, StartOptions(allow_change=frozenset({"schedule"}))
        )
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rates = {record["step"]: record["learning_rate"] for record in records if record["kind"] == "step"}
        return [each["text"] for each in records if each["kind"] == "warning" and "learning" in each["text"]], rates

    said, before = train("run", 4)
    assert said == []
    middle, last = (f"run/checkpoints/step-0000000{step}" for step in (2, 4))
    assert train("same", 4, middle)[0] == [] and train("finished", 4, last)[0] == []
    flat = {"type": "constant"}
    train("flat", 2, **flat)
    assert train("longer flat", 4, "flat/checkpoints/step-00000002", **flat)[0] == []
    for name, start, step in (("longer", middle, 2), ("extended", last, 4)):
        (text,), after = train(name, 8, start)
        assert f"was {before[step]:.2e} in step {step}, and is {after[step + 1]:.2e} in step {step + 1}: " in text
        assert "`terakoya fork`" in text and after[step + 1] > before[step + 1 if step == 2 else 4]
