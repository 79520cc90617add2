"""Which rows a run reads: stores split into training and validation, stages, order, skipped steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from safetensors.numpy import load_file

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.row_source import Rows, RowSource
from terakoya.rows.stores import Stores
from terakoya.store.token_store import TokenStore
from terakoya.training.setup import train_in_this_process
from terakoya.training.throughput import Throughput


def settings(store: Path, data: dict[str, Any], **changes: Any) -> Parameters:
    raw = toy.parameters(store, **changes)
    return Parameters.from_dict({**raw, "data": {**raw["data"], **data}}, source="test")


@pytest.mark.slow
def test_a_split_trains_on_the_first_documents_and_validates_on_the_next(store: Path, tmp_path: Path) -> None:
    parameters = settings(store, {"split": [8, 1, 1]}, max_steps=2, evaluation={"steps": 2, "batches": 2})
    stores = Stores.open(parameters.data)
    whole = TokenStore.open(store)
    bound = round(0.8 * whole.facts.documents)
    ends = [int(whole.offsets[document]) for document in (bound, round(0.9 * whole.facts.documents))]
    (held_out,) = stores.validation.values()
    np.testing.assert_array_equal(stores.train[0].tokens, whole.tokens[: ends[0]])
    np.testing.assert_array_equal(held_out.tokens, whole.tokens[ends[0] : ends[1]])
    train_in_this_process(parameters, tmp_path / "run")
    checks = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    names = {each["store"] for each in checks if each["kind"] == "validation"}
    assert names == {f"{store} (validation)"}


@pytest.mark.slow
def test_stores_of_the_same_content_are_told(store: Path, validation_store: Path, tmp_path: Path) -> None:
    def repetitions(**data: Any) -> list[str]:
        return Stores.open(settings(store, data).data).repetitions()

    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    (told,) = repetitions(train=[str(store)], validation=[str(copy), str(validation_store)])
    assert told.startswith(f"data.validation: {copy} has the content of the training store {store}: ")
    (told,) = repetitions(train=[str(store), str(copy)])
    assert told.startswith(f"data.train: {copy} has the content of {store}: ")
    assert repetitions(train=[str(store)], validation=[str(validation_store)]) == []
    assert repetitions(train=[str(store)], split=[9, 1]) == []
    train_in_this_process(settings(store, {"train": [str(store), str(copy)]}, max_steps=1), tmp_path / "run")
    assert told in [json.loads(line).get("text") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def test_validation_does_not_depend_on_what_else_a_run_reads(store: Path, validation_store: Path) -> None:
    alone = settings(store, {"validation": [str(validation_store)]})
    beside = settings(
        store, {"train": [str(store), str(validation_store)], "validation": [str(store), str(validation_store)]}
    )
    one, other = (
        Stores.open(each.data)
        .validation_rows(each.objective.row_layout(), seed=3)[str(validation_store)]
        .load(0, np.arange(5))
        for each in (alone, beside)
    )
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.keys, other.keys)
    assert len(set(one.keys.tolist())) == 5


@pytest.mark.slow
def test_skipped_steps_count_but_change_nothing(store: Path, tmp_path: Path) -> None:
    changes = {"max_steps": 8, "checkpoint": {"save_steps": 2, "keep": 9}}
    whole = settings(store, {}, **changes, optimizer={"type": "adamw", "learning_rate": 1e-12})
    some = settings(
        store, {"skip_steps": [[3, 4], [7, 7]]}, **changes, optimizer={"type": "adamw", "learning_rate": 1e-12}
    )
    for name, parameters in (("whole", whole), ("some", some)):
        train_in_this_process(parameters, tmp_path / name)
    whole_run, some_run = toy.records(tmp_path / "whole"), toy.records(tmp_path / "some")
    assert sorted(some_run) == [1, 2, 5, 6, 8]
    for step in some_run:  # weights hardly move, so equal losses are equal rows
        assert some_run[step]["loss"] == pytest.approx(whole_run[step]["loss"], abs=1e-6)
    trained = settings(store, {"skip_steps": [[3, 4]]}, **changes)
    train_in_this_process(trained, tmp_path / "trained")
    saved = [
        load_file(tmp_path / f"trained/checkpoints/step-0000000{step}/state/model-00000.safetensors") for step in (2, 6)
    ]
    manifest = json.loads((tmp_path / "trained/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["consumed_rows"] == 6 * 16
    assert any(not np.array_equal(value, saved[1][name]) for name, value in saved[0].items())
    assert not (tmp_path / "trained/checkpoints/step-00000004").exists(), "a skipped step is not saved"


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 100])
def test_validation_reads_rows_from_all_of_a_store(
    batches: int, store: Path, validation_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of a plan are pieces of the longest documents."""
    read = list[tuple[int, np.ndarray]]()
    load = RowSource.load

    def watched(self: RowSource, epoch: int, positions: np.ndarray) -> Rows:
        if self.store.folder == validation_store:
            read.append((len(self), positions))
        return load(self, epoch, positions)

    monkeypatch.setattr(RowSource, "load", watched)
    changes = {"max_steps": 1, "evaluation": {"steps": 1, "batches": batches}}
    train_in_this_process(settings(store, {"validation": [str(validation_store)]}, **changes), tmp_path / "run")
    (rows,), taken = {count for count, _ in read}, np.concatenate([positions for _, positions in read])
    count = min(16 * batches, rows)
    each = np.arange(count) * rows // count
    assert rows > 16 and np.array_equal(taken, [*each, *each]), "before the first step and after the last"


@pytest.mark.slow
def test_a_run_whose_last_steps_are_skipped_is_validated_at_its_end(
    store: Path, validation_store: Path, tmp_path: Path
) -> None:
    data = {"validation": [str(validation_store)], "skip_steps": [[2, 2]]}
    train_in_this_process(settings(store, data, max_steps=2, evaluation={"steps": 2, "batches": 1}), tmp_path / "run")
    assert sorted(toy.records(tmp_path / "run", "validation")) == [0, 2]


@pytest.mark.slow
def test_rates_leave_out_what_was_before_skipped_steps(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are divided by the time since they began to be counted."""
    counted = []
    values = Throughput.values
    monkeypatch.setattr(Throughput, "values", lambda self, **of: counted.append(of) or values(self, **of))
    train_in_this_process(settings(store, {"skip_steps": [[6, 7]]}, max_steps=8, logging_steps=8), tmp_path / "run")
    first, last = counted
    assert first["samples"] == last["samples"] == 16 and abs(last["tokens"] / first["tokens"] - 1) < 0.2


@pytest.mark.slow
def test_a_resumed_run_skips_steps(store: Path, tmp_path: Path) -> None:
    changes = {"checkpoint": {"save_steps": 2, "keep": 9}}
    train_in_this_process(settings(store, {}, max_steps=4, **changes), tmp_path / "run")
    later = settings(store, {"skip_steps": [[3, 6]]}, max_steps=8, **changes)
    train_in_this_process(later, tmp_path / "run")
    assert sorted(toy.records(tmp_path / "run")) == [1, 2, 3, 4, 7, 8]
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    (text,) = [record["text"] for record in records if record["kind"] == "warning"]
    assert text.startswith("data.skip_steps: [[3, 4]] comes too late: the checkpoint of step 4, from")
    assert "remove the checkpoints of step 3 and later" in text


@pytest.mark.slow
def test_a_run_resumes_within_a_stage(store: Path, validation_store: Path, tmp_path: Path) -> None:
    data = {"stages": [{"from_step": 4, "train": [str(validation_store), {"store": str(store), "weight": 3}]}]}
    changes = {"checkpoint": {"save_steps": 3, "keep": 9}, "schedule": {"type": "constant"}}
    train_in_this_process(settings(store, data, max_steps=7, **changes), tmp_path / "whole")
    for steps in (5, 7):
        train_in_this_process(settings(store, data, max_steps=steps, **changes), tmp_path / "parts")
    assert toy.losses(tmp_path / "parts") == toy.losses(tmp_path / "whole")
    manifest = json.loads((tmp_path / "parts/checkpoints/step-00000007/manifest.json").read_text())
    taken = {Path(each["store"]).parent.name: each["rows"] for each in manifest["positions"]}
    assert taken == {"train": 3 * 16 + 4 * 12, "validation": 4 * 4}


def test_sequential_order_reads_the_store_from_its_beginning(store: Path) -> None:
    parameters = settings(store, {"order": "sequential"}, objective={"type": "masked_lm", "layout": "stream"})
    stores = Stores.open(parameters.data)
    rows = stores.loader(parameters.objective.row_layout(), seed=parameters.seed, global_rows=16).load(0, 16)
    kept = rows.tokens[~np.isin(rows.tokens, stores.vocabulary.special)]
    np.testing.assert_array_equal(kept, stores.train[0].tokens[: len(kept)])
    packed = settings(store, {"order": "sequential"})
    with pytest.raises(UserError, match='"packed" combines documents'):
        stores.loader(packed.objective.row_layout(), seed=packed.seed, global_rows=16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"split": [0, 1]}, "first share above 0"),
        ({"split": [9, 1], "validation": ["a"]}, "not both"),
        ({"skip_steps": [[5, 3]]}, "first <= last"),
        ({"stages": [{"from_step": 1, "train": ["a"]}]}, "greater than or equal to 2"),
        ({"stages": [{"from_step": 9, "train": ["a"]}, {"from_step": 4, "train": ["a"]}]}, "to rise"),
        ({"stages": [{"from_step": 9, "train": ["a", "a"]}]}, "names a store twice"),
        ({"order": "random"}, "sequential"),
    ],
)
def test_invalid_settings_are_refused(store: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(store, data)


def test_a_split_that_leaves_a_side_empty_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leaves no document of .*; give it a larger share"):
        Stores.open(settings(store, {"split": [10000, 1]}).data)
    one = toy.make_store(tmp_path / "one", documents=1, seed=1)
    with pytest.raises(UserError, match=r"leaves no document of .*; one document cannot be split: set data\.split to"):
        Stores.open(settings(one, {"split": [1, 1]}).data)
