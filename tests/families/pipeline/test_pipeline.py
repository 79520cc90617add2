"""The pipeline: strict keys, stages that run once, outputs that no longer match, held-out documents."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.config.parameters import Parameters
from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.errors import UserError
from terakoya_pipeline.hold_out import hold_out
from terakoya_pipeline.run import Pipeline, _Plan, read_pipeline, run_pipeline
from terakoya_pipeline.stages import Stage, StageResult, content_digest, differences, run_stages

KEYS: dict[str, Any] = {
    "corpus": ["text.jsonl"],
    "tokenizer": {"type": "mecab_wordpiece", "vocab_size": 100},
    "tokenizer_folder": "out/tokenizer",
    "store": "out/store",
    "parameters": "tiny.json",
    "run": "out/run",
    "export": "out/model",
}


PRESETS = Path(__file__).parents[3] / "parameters"


# ------------------------------------------------------------------------------------------------------- the keys


def _read(tmp_path: Path, **changes: Any) -> Pipeline:
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({**KEYS, **changes}))
    return read_pipeline(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_foldr": "x"}, 'pipeline.json: tokenizer_foldr: unknown key; did you mean "tokenizer_folder"?'),
        ({"processes": "two"}, 'pipeline.json: processes: expected an integer.*, got "two"'),
        ({"corpus": []}, "pipeline.json: corpus: .*at least 1 item"),
        ({"hold_out": 3}, "validation_store goes together with validation_corpus or hold_out"),
        ({"validation_store": "out/val"}, "validation_store goes together with validation_corpus or hold_out"),
        ({"hold_out": 3, "validation_corpus": ["v.txt"], "validation_store": "out/val"}, "not both"),
        ({"tokenizer": {"vocab_size": 5}}, "tokenizer.type: expected a name"),
        ({"run": "out/store"}, "expected separate folders"),
        ({"run": "out/store/run"}, "expected separate folders"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _read(tmp_path, **changes)


MODEL: dict[str, Any] = {
    "data": {"sequence_length": 32},
    "architecture": {
        "type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 32,
    },
    "objective": {"type": "masked_lm"}, "optimizer": {"type": "adamw"}, "schedule": {"type": "linear"},
    "batch_size": {"-1": 2}, "max_steps": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ({}, {"architecture": {**MODEL["architecture"], "hidden_act": "x"}}, 'hidden_act: .* such as "gelu", got "x"'),
        ({}, {"arcitecture": {}}, 'arcitecture: unknown key; did you mean "architecture"'),
        ({}, {"batch_size": {"0": 2, "1": 2}}, "batch_size: "),
        ({"training_processes": 3}, {"parallel": {"tp_size": 2}}, "3 processes.*"),
        ({}, {"objective": {"type": "masked_lm", "layout": "lines"}}, 'unit: expected "line" .*, got "document"; set'),
        ({}, {"start_from": "nowhere"}, "start_from: nowhere is not a folder"),
        ({"tokenizer": {"type": "byte_bpe"}}, {}, r"masked_lm: the store's vocabulary has no \[MASK\]"),
        (
            {},
            {
                "architecture": {"type": "t5"},
                "objective": {"type": "span_corruption"},
                "data": {"sequence_length": 512},
            },
            "sentinel tokens, one for each span, but there are 10. Train the tokenizer with num_unused_tokens",
        ),
    ],
    ids=["size", "key", "nodes", "processes", "layout", "start", "tokenizer", "sentinels"],
)
def test_what_training_refuses_is_found_before_the_first_stage(
    tmp_path: Path, keys: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    (tmp_path / "text.txt").write_text("春が来た。\n")
    folders = {key: str(tmp_path / str(KEYS[key])) for key in ("tokenizer_folder", "store", "run", "export")}
    given = {**folders, "corpus": [str(tmp_path / "text.txt")], **keys, "parameters": {**MODEL, **model}}
    with pytest.raises(UserError, match=message):
        run_pipeline(_read(tmp_path, **given))
    assert not (tmp_path / "out").exists()


def test_a_pipeline_of_another_processor_is_refused_where_its_precision_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.toolkit.fast_products.multiplies_fast", lambda precision, device: False)
    monkeypatch.setattr("terakoya.toolkit.fast_products.slowdown", lambda precision, device: 41.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("春が来た。\n")
    given = {"corpus": [str(tmp_path / "text.txt")], "parameters": {**MODEL, "precision": "bf16"}}
    with pytest.raises(
        UserError, match=r"^parameters.precision: .* multiplies bf16 41 times slower than fp32; use fp32"
    ):
        run_pipeline(_read(tmp_path, **given))
    run_pipeline(_read(tmp_path, **given), trains=False).close()


def test_stores_are_made_for_a_run_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes and GPUs of these are not compared with this machine's; with one for each, the same file continues."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("春が来た。\n\n夏も来た。\n\n" * 9, encoding="utf-8")
    several = {**MODEL, "batch_size": {"*": 1}}
    _read(tmp_path, corpus=["text.txt"], parameters=several, training_processes=16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(UserError, match="training_processes: expected at most 8, the GPUs of this machine, got 16"):
        run_pipeline(read_pipeline(tmp_path / "pipeline.json"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert exit_code("run", "pipeline.json", "--no-train") == 0
    assert capsys.readouterr().err.endswith("next: terakoya train out/run.parameters.json --out out/run\n")
    assert Path("out/store/store.json").is_file() and not Path("out/run").exists()
    written = json.loads(Path("out/run.parameters.json").read_text(encoding="utf-8"))
    assert written == several | {"data": {**MODEL["data"], "train": [{"store": "out/store", "weight": 1.0}],
                                          "validation": []}}  # fmt: skip
    nodes = Parameters.load(Path("out/run.parameters.json"), nodes=2).batch_size
    assert nodes == {"0": 1, "1": 1}
    _read(tmp_path, corpus=["text.txt"], parameters=several, training_processes=1)
    assert exit_code("run", "pipeline.json") == 0
    assert capsys.readouterr().out.count("is already made from the same settings") == 2
    assert Path("out/model/config.json").is_file()


@pytest.mark.parametrize(
    ("codes", "starts"),
    [((137, 1, 0), 3), ((139, 76, 74), 3), ((2,), 1), ((3,), 1), ((75,), 1), ((130,), 1), ((143,), 1), ((0,), 1)],
)
def test_a_crash_is_followed_by_a_start_while_checkpoints_are_made(
    codes: tuple[int, ...], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are, at steps 10 and 20."""
    started: list[Sequence[str]] = []

    def run_processes(words: Sequence[str], processes: int) -> int:
        started.append(words)
        (tmp_path / f"run/checkpoints/step-000000{min(len(started), 2)}0").mkdir(parents=True, exist_ok=True)
        assert processes == 2 and words[0] == "train"
        return codes[len(started) - 1]

    monkeypatch.setattr("terakoya.launch.local.run_processes", run_processes)
    keys = {**KEYS, "parameters": MODEL, "run": str(tmp_path / "run"), "training_processes": 2}
    assert _Plan(Pipeline.model_validate(keys))._train_in(2) == codes[-1] and len(started) == starts


# ----------------------------------------------------------------------------------------------------- the stages


class Maker:
    """A stage that writes its inputs into its output and counts its runs."""

    def __init__(self, out: Path, read_inputs: Callable[[], Any], *, resumes: bool = False) -> None:
        self.out, self.calls, self.fail = out, 0, False
        self.stage = Stage(out.name, out.name, out, lambda: {"from": read_inputs()}, self.make, resumes=resumes)
        self.read_inputs = read_inputs

    def make(self) -> dict[str, Any]:
        self.calls += 1
        if self.stage.resumes:
            self.out.mkdir(exist_ok=True)
        if self.fail:
            raise RuntimeError("killed")
        self.out.mkdir(exist_ok=True)
        (self.out / "content").write_text(json.dumps(self.read_inputs()))
        return {"calls": self.calls}


class Chain:
    """Three stages, each made from the one before; the second resumes."""

    def __init__(self, folder: Path) -> None:
        self.setting = 1
        self.first = Maker(folder / "first", lambda: self.setting)
        self.second = Maker(folder / "second", lambda: content_digest(self.first.out), resumes=True)
        self.third = Maker(folder / "third", lambda: content_digest(self.second.out))
        self.makers = [self.first, self.second, self.third]

    def run(self, *, redo: bool = False) -> list[StageResult]:
        return list(run_stages([maker.stage for maker in self.makers], redo=redo))

    @property
    def calls(self) -> list[int]:
        return [maker.calls for maker in self.makers]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_a_second_run_makes_nothing(chain: Chain) -> None:
    assert [result.skipped for result in chain.run()] == [False, False, False]
    results = chain.run()
    assert [result.skipped for result in results] == [True, True, True]
    assert [result.facts for result in results] == [{"calls": 1}] * 3
    assert chain.calls == [1, 1, 1]


def test_a_deleted_output_is_made_again(chain: Chain) -> None:
    chain.run()
    (chain.third.out / "content").unlink()
    chain.third.out.rmdir()
    assert [result.skipped for result in chain.run()] == [True, True, False]


@pytest.mark.parametrize("crashed", [0, 1, 2])
def test_the_pipeline_continues_after_a_crash_in_any_stage(chain: Chain, crashed: int) -> None:
    chain.makers[crashed].fail = True
    with pytest.raises(RuntimeError, match="killed"):
        chain.run()
    chain.makers[crashed].fail = False
    assert [result.skipped for result in chain.run()] == [index < crashed for index in range(3)]


def test_a_crash_between_output_and_record_counts_as_done(chain: Chain) -> None:
    chain.run()
    record = chain.first.out.with_name(".first.stage.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "finished": False, "content": None}))
    assert all(result.skipped for result in chain.run())
    assert json.loads(record.read_text())["finished"]


def test_a_record_that_the_system_cannot_read_is_no_reason_to_delete_its_output(chain: Chain) -> None:
    record = chain.first.out.with_name(".first.stage.json")
    record.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        chain.run()
    record.rmdir()
    record.write_text("{")
    with pytest.raises(UserError, match=f"delete it and {chain.first.out}"):
        chain.run()


def test_changed_settings_are_refused_by_name(chain: Chain) -> None:
    chain.run()
    chain.setting = 2
    with pytest.raises(UserError, match=r'first: was made from other settings: from: 1 -> 2; .*"first".*--redo'):
        chain.run()
    assert chain.calls == [1, 1, 1]


def test_changes_are_named_by_their_innermost_keys() -> None:
    steps = [{"type": "exact_duplicates"}, {"type": "hold_out", "share": 0.05}]
    old = {"corpus": "ced4", "clean": steps, "order": ["a", "b"]}
    other = [steps[0], {**steps[1], "share": 0.1}]
    assert differences(old, {**old, "clean": other}) == ["clean.1.share: 0.05 -> 0.1"]
    assert differences(old, {**old, "clean": other, "corpus": "bf75"}) == ["clean.1.share: 0.05 -> 0.1"]
    assert differences(old, {**old, "corpus": "bf75"}) == ['corpus: "ced4" -> "bf75"']
    assert differences(old, {**old, "clean": steps[:1]}) == ['clean.1: {"type": "hold_out", "share": 0.05} -> null']
    assert differences(old, {**old, "order": ["b", "a"]}) == ['order: ["a", "b"] -> ["b", "a"]']


def test_redo_moves_aside_and_makes_again(chain: Chain) -> None:
    chain.run()
    chain.setting = 2
    assert [result.skipped for result in chain.run(redo=True)] == [False, False, False]
    assert (chain.first.out.with_name("first.old-1") / "content").read_text() == "1"
    assert (chain.first.out / "content").read_text() == "2"
    chain.setting = 3
    chain.run(redo=True)
    assert (chain.first.out.with_name("first.old-2") / "content").read_text() == "2"


def test_an_output_changed_by_hand_is_refused(chain: Chain) -> None:
    chain.run()
    (chain.third.out / "content").write_text("other")
    with pytest.raises(UserError, match="third: was changed after it was made"):
        chain.run()


def test_a_foreign_output_is_refused_before_anything_is_made(chain: Chain) -> None:
    chain.third.out.mkdir()
    with pytest.raises(UserError, match="third: already exists and was not made by this pipeline"):
        chain.run()
    assert chain.calls == [0, 0, 0]


def test_a_stage_that_would_leave_a_later_output_out_of_date_is_not_made(chain: Chain) -> None:
    chain.run()
    chain.first.out.rename(chain.first.out.with_name("elsewhere"))
    with pytest.raises(UserError, match=r"third: would be out of date once .*first is made"):
        chain.run()
    assert chain.calls == [1, 1, 1]


def test_a_resuming_stage_itself_decides_about_changed_settings(chain: Chain) -> None:
    chain.run()
    stages = [Stage("second", "second", chain.second.out, lambda: {"from": "longer"}, chain.second.make, resumes=True)]
    assert [result.skipped for result in run_stages(stages)] == [False]
    assert chain.second.calls == 2


def test_an_outdated_output_behind_a_stage_that_continues_is_named_with_what_keeps_the_progress(chain: Chain) -> None:
    chain.run()
    longer = Stage("second", "run", chain.second.out, lambda: {"from": "longer"}, chain.second.make, resumes=True)
    with pytest.raises(UserError, match=r"third: would be out of date once .*second continues; .*--redo would move"):
        list(run_stages([longer, chain.third.stage]))

    def refuse() -> None:
        raise UserError("other values of seed")

    with pytest.raises(UserError, match="other values of seed"):  # first, as it does not continue at all
        list(run_stages([replace(longer, check=refuse), chain.third.stage]))
    assert chain.calls == [1, 1, 1]


def test_an_older_record_is_upgraded_and_saved(tmp_path: Path) -> None:
    settings = {"from": 1}

    def make() -> dict[str, Any]:
        (tmp_path / "out").mkdir()
        return {"made": True}

    def stage() -> Stage:
        return Stage(
            "out", "out", tmp_path / "out", lambda: dict(settings), make, upgrade=lambda old: {"new": 1, **old}
        )

    list(run_stages([stage()]))
    settings["new"] = 1
    assert [(result.skipped, result.facts) for result in run_stages([stage()])] == [(True, {"made": True})]
    settings["new"] = 2
    with pytest.raises(UserError, match=r"out: was made from other settings: new: 1 -> 2"):
        list(run_stages([stage()]))


def test_redo_moves_aside_an_output_that_a_resuming_stage_refuses(tmp_path: Path) -> None:
    settings = ["old"]

    def make() -> dict[str, Any]:
        if (tmp_path / "out").exists() and (tmp_path / "out" / "content").read_text() != settings[0]:
            raise UserError("made from other settings")
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "content").write_text(settings[0])
        return {}

    stages = [Stage("out", "out", tmp_path / "out", lambda: {"from": settings[0]}, make, resumes=True)]
    list(run_stages(stages))
    settings[0] = "new"
    for _ in range(2):
        with pytest.raises(UserError, match="made from other settings"):
            list(run_stages(stages))
    settings[0] = "old"
    list(run_stages(stages))
    settings[0] = "new"
    with pytest.raises(UserError, match="made from other settings"):
        list(run_stages(stages))
    assert [result.skipped for result in run_stages(stages, redo=True)] == [False]
    assert (tmp_path / "out.old-1" / "content").read_text() == "old"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (75, "train: stopped on request, checkpoint saved"),
        (1, "error: train: failed with exit code 1"),
        (137, "error: train: failed with exit code 137"),
    ],
)
def test_the_command_ends_with_the_exit_code_of_its_training(
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held_out = {"hold_out": 3, "validation_store": "out/val"}
    parameters = str(PRESETS / "tiny_bert.json")
    plan = _Plan(_read(tmp_path, parameters=parameters, run=str(tmp_path / "run"), training_processes=2, **held_out))
    monkeypatch.setattr("terakoya.launch.local.run_processes", lambda *_: code)
    monkeypatch.setattr("terakoya_pipeline.run.run_pipeline", lambda *_, **__: plan._train())
    assert exit_code("run", tmp_path / "pipeline.json") == code
    first, rest = capsys.readouterr().err.split("\n", 1)
    assert first.startswith("terakoya run: reads ") and rest.startswith(message)


# --------------------------------------------------------------------------------------------------- the hold-out


def _documents(corpus: Corpus) -> list[str | None]:
    return [
        read.text if isinstance(read, Document) else None for block in corpus.blocks() for read in corpus.read(block)
    ]


@given(
    documents=st.lists(st.text("あいう\r 　", min_size=1, max_size=6).filter(str.strip), min_size=2, max_size=12),
    data=st.data(),
)
@settings(max_examples=25)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.gz"])
def test_hold_out_splits_without_loss(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, documents: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    count = data.draw(st.integers(1, len(documents) - 1))
    file = folder / f"last{suffix}"
    if suffix == ".txt":
        content = "\n\n".join(documents)
    else:
        content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in documents) + "\n"
    file.write_bytes(gzip.compress(content.encode()) if suffix.endswith(".gz") else content.encode())
    (folder / "other.txt").write_text("別のファイル。\n")
    whole = Corpus([folder / "other.txt", file])
    expected = _documents(whole)
    assert len(expected) == len(documents) + 1

    kept, held = hold_out(whole, count, folder / "split")

    assert kept[0] == folder / "other.txt"
    assert _documents(Corpus(kept)) == expected[:-count]
    assert _documents(Corpus([held])) == expected[-count:]


def test_hold_out_keeps_bad_lines_where_they_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "b"}\n\xff\n{"text": "c"}\n')
    kept, held = hold_out(Corpus([file]), 1, tmp_path / "split")
    assert _documents(Corpus(kept)) == ["a", None, "b", None]
    assert _documents(Corpus([held])) == ["c"]
    rejects = [read for block in Corpus(kept).blocks() for read in Corpus(kept).read(block) if isinstance(read, Reject)]
    assert [reject.reason for reject in rejects] == ["bad JSON", "bad encoding"]


def test_hold_out_refuses_to_take_everything(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("一\n\n二\n")
    with pytest.raises(UserError, match=r"hold_out: expected fewer documents than the last file has .*: 2\), got 2"):
        hold_out(Corpus([file]), 2, tmp_path / "split")
