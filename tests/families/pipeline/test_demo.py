"""The demo prints a summary, writes a model that Transformers loads, and can run twice."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer

from terakoya.corpus.corpus import Corpus, Document
from terakoya.errors import UserError
from terakoya_pipeline.commands.demo import demo
from terakoya_pipeline.commands.run import run
from terakoya_pipeline.demo import HELD_OUT, SENTENCES, Demo, summary_lines
from terakoya_pipeline.run import read_pipeline, run_pipeline
from terakoya_pipeline.stages import StageResult


@pytest.fixture(scope="module")
def finished(warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, list[StageResult]]:
    """A demo of four steps and the results of its stages."""
    files = Demo(tmp_path_factory.mktemp("demo") / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python))
        return files, list(run_pipeline(files.write(max_steps=4)))


def texts(name: str) -> list[str]:
    """The documents of a bundled corpus."""
    corpus = Corpus([Path(__file__).resolve().parents[3] / "core" / "terakoya" / "corpus" / name])
    return [read.text for block in corpus.blocks() for read in corpus.read(block) if isinstance(read, Document)]


def pieces(text: str, length: int) -> set[str]:
    """All that `length` characters in a row of `text` say."""
    return {text[start : start + length] for start in range(len(text) - length + 1)}


@pytest.mark.parametrize("name", ["demo_corpus.txt", "demo_town.txt"])
def test_the_bundled_corpora_are_prose_in_many_documents(name: str) -> None:
    documents = texts(name)
    assert len(documents) >= 200
    assert len(set(documents)) == len(documents)
    assert sum(len(text.encode()) for text in documents) >= 60_000
    sentences = [sentence for text in documents for sentence in text.replace("\n", "").split("。") if sentence]
    assert len(set(sentences)) >= 0.99 * len(sentences)  # prose, not filled templates


def test_the_held_out_documents_and_the_sentences_are_new_to_the_model() -> None:
    documents = texts("demo_town.txt")
    learnt, held_out = "\n".join(documents[:-HELD_OUT]), "\n".join(documents[-HELD_OUT:])
    seen = pieces(learnt, 12)
    unseen = pieces(held_out, 12)
    assert len(unseen & seen) <= 0.01 * len(unseen)
    for sentence in SENTENCES:
        assert all(len(part) < 12 or not pieces(part, 12) & seen for part in sentence.split("[MASK]")), sentence


def test_every_stage_is_made_and_summarised_in_order(finished: tuple[Demo, list[StageResult]]) -> None:
    files, results = finished
    assert [result.name for result in results] == ["tokenizer", "prepare", "prepare validation", "train", "export"]
    assert not any(result.skipped for result in results)
    lines = list(summary_lines(files, results))
    assert [line[:2] for line in lines[:5]] == ["1.", "2.", "3.", "4.", "5."]
    text = "\n".join(lines)
    before, after = files.validations()[0], files.validations()[-1]
    assert (before["step"], after["step"]) == (0, 4)
    assert f"Validation loss {before['loss']:.3f} -> {after['loss']:.3f}" in text
    assert all(sentence in text for sentence in SENTENCES)
    assert f'AutoModelForMaskedLM.from_pretrained("{files.model}")' in text


def test_its_first_steps_on_a_processor_with_avx2_alone(finished: tuple[Demo, list[StageResult]]) -> None:
    """They learn, and are not much slower than AdamW's: Muon's products in bf16 would take many times as long."""
    files, _ = finished
    parameters = json.loads((files.folder / "run/parameters.json").read_text())
    parameters |= {"logging_steps": 1, "evaluation": None, "trackers": [], "checkpoint": {"save_steps": 30}}
    imitated = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    losses, seconds = {}, {}
    for name in ("muon", "adamw"):
        changed = {"max_steps": 30, "optimizer": {"type": name, "learning_rate": 1e-2, "weight_decay": 0.1}}
        (files.folder / f"{name}.json").write_text(json.dumps(parameters | changed))
        out = files.folder / name
        command = [sys.executable, "-m", "terakoya", "train", str(out.with_suffix(".json")), "--out", str(out)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(command, env={**os.environ, **imitated}, check=True, capture_output=True)
        seconds[name] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses["muon"]) == 30 and losses["muon"][-1] < losses["muon"][0] - 2
    assert seconds["muon"] < 1.5 * seconds["adamw"], "of the processor, so that other programs change little"


def test_the_held_out_documents_are_not_trained_on(finished: tuple[Demo, list[StageResult]]) -> None:
    _, results = finished
    facts = {result.name: result.facts for result in results}
    assert facts["prepare validation"]["documents"] == 20
    assert facts["prepare"]["documents"] >= 180


def test_plain_transformers_loads_the_model(finished: tuple[Demo, list[StageResult]]) -> None:
    files, _ = finished
    model = AutoModelForMaskedLM.from_pretrained(files.model, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(files.model, local_files_only=True)
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert type(tokenizer).__name__ == "BertJapaneseTokenizer"
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.mask_token_id in tokenizer(SENTENCES[0])["input_ids"]


def test_a_second_demo_makes_nothing(
    finished: tuple[Demo, list[StageResult]], capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = finished
    record = (files.folder / "run" / "metrics.jsonl").read_bytes()
    assert demo(files.folder, max_steps=4) == files.model
    assert (files.folder / "run" / "metrics.jsonl").read_bytes() == record
    assert "made earlier" in capsys.readouterr().out


def test_the_written_pipeline_can_be_run_and_changed(
    finished: tuple[Demo, list[StageResult]], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    files, stages = finished
    capsys.readouterr()
    with caplog.at_level("INFO", "terakoya"):
        assert all(result.skipped for result in run(read_pipeline(files.pipeline_file)))
    said = "".join(capsys.readouterr()) + caplog.text
    assert all(said.count(f"{each.name}: {each.out} ") == 1 for each in stages), "one line for each finished stage"
    assert "distinct words " in said and "count error" not in said and "_error" not in said
    changed = json.loads(files.pipeline_file.read_text(encoding="utf-8"))
    other = files.folder / "changed.json"
    other.write_text(json.dumps({**changed, "parameters": {**changed["parameters"], "seed": 7}}), encoding="utf-8")
    with pytest.raises(
        UserError, match='other values of seed; give other folders as "run" and "export", or use --redo'
    ):
        run(read_pipeline(other))
    changed["tokenizer"]["vocab_size"] = 2400
    other.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size: 2500 -> 2400"):
        run(read_pipeline(other))


def test_other_settings_remove_only_the_files_of_the_demo(tmp_path: Path) -> None:
    files = Demo(tmp_path / "out")
    files.write(max_steps=4)
    mine, run_folder = files.folder / "notes.txt", files.folder / "run"
    mine.write_text("mine")
    run_folder.mkdir()
    files.write(max_steps=4)
    assert run_folder.exists()
    files.write(max_steps=6)
    assert not run_folder.exists()
    assert mine.read_text() == "mine"
    run_folder.mkdir()
    files.write(max_steps=6, fresh=True)
    assert not run_folder.exists()


@pytest.mark.parametrize("name", ["pipeline.json", "corpus.txt"])
def test_a_demo_whose_files_were_changed_is_left_alone(name: str, tmp_path: Path) -> None:
    files = Demo(tmp_path / "out")
    files.write(max_steps=4)
    (files.folder / "run").mkdir()
    changed = files.folder / name
    changed.write_text(changed.read_text(encoding="utf-8") + " ", encoding="utf-8")
    for fresh in (False, True):
        with pytest.raises(UserError, match="is not as a demo wrote it"):
            files.write(max_steps=4, fresh=fresh)
    assert (files.folder / "run").is_dir() and changed.read_text(encoding="utf-8").endswith(" ")
    own = Demo(tmp_path / "own")
    own.folder.mkdir()
    own.pipeline_file.write_text("{}")
    with pytest.raises(UserError, match="choose another --out, or remove it first"):
        own.write()
