"""Where a run ends: with the step that reaches its tokens, after one epoch of rows, or at its time limit."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import toy
from killed_runs import kill_and_resume
from saved_weights import FAULTS
from small_preparation import prepare_corpus
from small_vocabularies import train_tokenizers

import terakoya
from terakoya.components.progress import Length
from terakoya.config.parameters import Parameters
from terakoya.corpus.corpus import Corpus
from terakoya.distributed.topology import RankBatch
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import BatchMaker
from terakoya.training.run_plan import plan_without_phases
from terakoya.training.setup import train_in_this_process


def in_tokens(store: Path, **changes: Any) -> dict[str, Any]:
    """A toy run of 2,800 tokens, a dozen steps of lines of many lengths, with a learning rate by tokens."""
    settings = toy.parameters(
        store, max_steps=None, max_tokens=2800, objective={"type": "masked_lm", "layout": "lines"}, logging_steps=1,
        schedule={"type": "cosine", "warmup_tokens": 300, "lr_decay_tokens": 2300, "min_lr": 0.0005}, **changes,
    )  # fmt: skip
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    return settings


def learning_rates(out: Path) -> dict[int, float]:
    return {step: line["learning_rate"] for step, line in toy.records(out).items()}


def manifest(out: Path, step: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return loaded


def test_no_batch_is_made_that_the_run_does_not_take(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond the end may be another epoch, whose plan would be made for nothing."""
    made: list[int] = []
    real = BatchMaker.__call__
    monkeypatch.setattr(BatchMaker, "__call__", lambda self, step: made.append(step) or real(self, step))
    train_in_this_process(Parameters.from_dict(toy.parameters(store, max_steps=2), source="test"), tmp_path / "run")
    assert made == [0, 1]


@pytest.mark.slow
def test_a_run_ends_with_the_step_that_reaches_its_tokens_on_any_number_of_processes(
    line_store: Path, tmp_path: Path
) -> None:
    output = toy.train(in_tokens(line_store), tmp_path / "one")
    toy.train(in_tokens(line_store, batch_size={"0": 9, "1": 7}), tmp_path / "two", nodes=(1, 1))
    tokens = {step: line["tokens"] for step, line in toy.records(tmp_path / "one").items()}
    last = max(tokens)
    assert tokens[last] >= 2800 > tokens[last - 1]
    assert len({tokens[step] - tokens.get(step - 1, 0) for step in tokens}) > 3, "steps of many sizes"
    assert "2,800 tokens, about" in output and f"step {last:,}  {tokens[last]:,}/2,800 tokens" in output
    rates = learning_rates(tmp_path / "one")
    assert learning_rates(tmp_path / "two") == rates
    for step, rate in rates.items():
        before = tokens.get(step - 1, 0)
        if before >= 300:
            fall = min(1.0, (before - 300) / 2000)
            expected = 0.0005 + 0.0045 * (1 + math.cos(math.pi * fall)) / 2
            assert rate == pytest.approx(expected, rel=1e-12), step
    assert rates[last] == pytest.approx(0.0005) and rates[last] < rates[last - 4], "held at its floor"
    assert manifest(tmp_path / "one", last)["consumed_tokens"] == tokens[last]


@pytest.mark.nightly
def test_killed_and_resumed_by_tokens_is_bit_identical(line_store: Path, tmp_path: Path) -> None:
    """With an optimizer that combines two, in two processes."""
    settings = in_tokens(line_store, batch_size={"0": 9, "1": 7}, optimizer={"type": "muon", "learning_rate": 0.005})
    kill_and_resume(settings, tmp_path, nodes=(1, 1))
    assert learning_rates(tmp_path / "cut") == learning_rates(tmp_path / "straight")


@pytest.mark.nightly
def test_validation_losses_survive_a_kill(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """A threshold no loss can meet: every second validation lowers the learning rate."""
    settings = toy.parameters(
        store, validation_store, evaluation={"steps": 2, "batches": 1}, checkpoint={"save_steps": 4},
        schedule={"type": "plateau", "patience": 1, "threshold": 100.0, "threshold_mode": "abs", "decay_factor": 0.5},
    )  # fmt: skip
    toy.train(settings, tmp_path / "straight", plugins=FAULTS)
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, environment={"FAULT": "kill:6"}, code=-signal.SIGKILL)
    assert "at step 4" in toy.train(settings, tmp_path / "cut", plugins=FAULTS)
    rates = learning_rates(tmp_path / "straight")
    assert learning_rates(tmp_path / "cut") == rates
    # validated after 0, 2, 4, ... steps: the first is the best, the third is the second that is no better
    assert [rates[step] for step in (4, 5, 8, 9)] == [0.005, 0.0025, 0.0025, 0.00125]
    assert [step for step, _ in manifest(tmp_path / "straight", 12)["validation_losses"]] == [0, 2, 4, 6, 8, 10, 12]


def test_an_epoch_takes_each_row_once_whatever_the_split(store: Path) -> None:
    parameters = Parameters.from_dict(toy.parameters(store), source="test")
    opened = TokenStore.open(store)
    source = RowSource(opened, parameters.objective.row_layout(), sequence_length=32, seed=3, store_id=0)
    rows = len(source)
    assert rows % 16, "the last step is not full"
    seen: list[list[int]] = []
    for split in ([(0, 16)], [(0, 6), (6, 11), (11, 16)]):
        keys: list[int] = []
        for start, stop in split:
            rank_batch = RankBatch(start, stop, 4, -(-(stop - start) // 4), 16)
            length = Length(steps=-(-rows // 16), tokens=0, rows=rows)
            plan = plan_without_phases(parameters, Loader([source], [1.0]), rank_batch, length)
            make = BatchMaker(plan, opened.facts.vocabulary)
            for step in range(-(-rows // 16)):
                batches = make(step)
                assert len(batches.real) == rank_batch.micro_steps or batches.dummy is not None
                keys += [hash(row.tobytes()) for batch in batches.real for row in batch.arrays["input_ids"]]
        seen.append(sorted(keys))
        assert len(keys) == rows
    assert seen[0] == seen[1]
    every = Loader([source], [1.0]).load(0, rows)
    assert len(set(every.keys.tolist())) == rows


def test_a_rate_that_changes_depends_on_the_rows_before_the_step_and_not_on_the_split(store: Path) -> None:
    """The masks of a step are those of its share of the run's rows, however it is divided and whenever it is read."""
    settings = toy.parameters(store, objective={"type": "masked_lm", "mlm_probability": {"start": 0.6, "end": 0.1}})
    parameters = Parameters.from_dict(settings, source="test")
    opened = TokenStore.open(store)
    source = RowSource(opened, parameters.objective.row_layout(), sequence_length=32, seed=3, store_id=0)

    def maker(start: int, stop: int) -> BatchMaker:
        rank_batch = RankBatch(start, stop, 4, -(-(stop - start) // 4), 16)
        length = Length(steps=10, tokens=0)
        plan = plan_without_phases(parameters, Loader([source], [1.0]), rank_batch, length)
        return BatchMaker(plan, opened.facts.vocabulary)

    def inputs(make: BatchMaker, step: int) -> list[bytes]:
        return [row.tobytes() for batch in make(step).real for row in batch.arrays["input_ids"]]

    def masked_share(step: int) -> float:
        batches = maker(0, 16)(step).real
        return sum(each.counts["masked"] for each in batches) / sum(each.counts["tokens"] for each in batches)

    for step in (7, 0, 9):
        assert inputs(maker(0, 16), step) == [*inputs(maker(0, 5), step), *inputs(maker(5, 16), step)]
    late = maker(0, 16)
    late.plan = late.plan.continued_at(4, 65)
    assert late.plan.rows(7) == (113, 129) and inputs(late, 7) != inputs(maker(0, 16), 7)
    late.plan = late.plan.continued_at(4, 64)
    assert inputs(late, 7) == inputs(maker(0, 16), 7)
    assert masked_share(0) > 0.5 > 0.25 > masked_share(9) > 0.1


def flash_shapes(store: Path, *, length: int, rows: int) -> set[tuple[tuple[int, ...], ...]]:
    """The shapes of what flash attention is told of documents, in 200 steps of one micro-batch."""
    raw = toy.parameters(store, objective={"type": "masked_lm", "whole_word_mask": False})
    raw["data"]["sequence_length"] = raw["architecture"]["max_position_embeddings"] = length
    parameters = Parameters.from_dict(raw, source="test")
    opened = TokenStore.open(store)
    source = RowSource(opened, parameters.objective.row_layout(), sequence_length=length, seed=3, store_id=0)
    rank_batch = RankBatch(0, rows, rows, 1, rows)
    plan = plan_without_phases(parameters, Loader([source], [1.0]), rank_batch, Length(steps=200, tokens=0))
    make = BatchMaker(plan, opened.facts.vocabulary, flash=True)
    names = ("cu_seqlens", attention.LONGEST_DOCUMENT)
    return {tuple(make(step).real[0].arrays[name].shape for name in names) for step in range(200)}


def test_steps_for_flash_attention_have_few_shapes(store: Path) -> None:
    """A kernel is compiled, or a graph captured, for each."""
    shapes = flash_shapes(store, length=32, rows=64)
    assert 1 <= len(shapes) <= 3
    assert max(room for (room,), _ in shapes) <= 129, "of 2,048 places"


@pytest.mark.nightly
@pytest.mark.parametrize(("length", "rows"), [(128, 32), (512, 16)])
def test_so_have_those_of_the_bundled_corpus(length: int, rows: int, bundled_store: Path) -> None:
    assert 1 <= len(flash_shapes(bundled_store, length=length, rows=rows)) <= 3


@pytest.fixture(scope="module")
def bundled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of `terakoya demo`, by a tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("bundled")
    corpus = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
    (folder / "tokenizer").mkdir()
    train_tokenizers(folder / "tokenizer", corpus.read_text(encoding="utf-8"), "bytes")
    tokenizer = recognise_tokenizer(folder / "tokenizer")
    prepare_corpus(Corpus([corpus]), tokenizer, folder / "tokenizer", folder / "store", unit="document")
    return folder / "store"


@pytest.mark.slow
def test_a_run_of_epochs_ends_after_its_rows_and_can_be_extended(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=None, epochs=1, checkpoint={"save_steps": 1000})
    opened = TokenStore.open(store)
    objective = Parameters.from_dict(settings, source="test").objective
    rows = len(RowSource(opened, objective.row_layout(), sequence_length=32, seed=42, store_id=0))
    steps = -(-rows // 16)
    output = toy.train({**settings, "batch_size": {"0": 9, "1": 7}}, tmp_path / "run", nodes=(1, 1))
    assert f"{rows:,} rows in {steps} steps" in output
    assert max(toy.records(tmp_path / "run")) == steps
    assert manifest(tmp_path / "run", steps)["consumed_rows"] == rows
    output = toy.train({**settings, "epochs": 1.5}, tmp_path / "run")
    assert f"the last of the {steps} steps before held fewer rows" in output
    wanted = math.ceil(1.5 * rows)
    last = max(toy.records(tmp_path / "run"))
    assert last == steps + -(-(wanted - rows) // 16)
    assert manifest(tmp_path / "run", last)["consumed_rows"] == wanted


@pytest.mark.slow
def test_a_run_saves_and_stops_at_its_time_limit(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=1_000_000, max_minutes=0.001, logging_steps=1000)
    output = toy.train(settings, tmp_path / "run", code=75)
    assert "stopped by max_minutes 0.001 at step" in output and "the same command continues the run" in output
    assert list((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))
