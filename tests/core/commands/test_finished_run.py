"""A finished run that is started again says so, how it continues, and what comes next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy
from command_line import call

from terakoya import log
from terakoya.commands.guidance import next_command
from terakoya.conversion.export import export
from terakoya_pipeline.commands import run as run_command
from terakoya_pipeline.settings import Pipeline


def train(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, _, said = call(capsys, "train", "toy.json", "--out", "work/run", *arguments)
    assert code == 0, said
    return said


def test_a_finished_run_says_that_it_is_finished_and_how_it_continues(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.json").write_text(json.dumps(toy.parameters(store, max_steps=2)))
    first = train(capsys)
    assert "finished" not in first and "next: terakoya export work/run --out work/model\n" in first
    again = train(capsys)
    assert "the run is finished: 2 of 2 steps, nothing is left to train; a larger value of max_steps continues" in again
    assert "--set max_steps=NUMBER" in again and again.endswith("next: terakoya export work/run --out work/model\n")
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    try:
        japanese = train(capsys, "--set", "max_steps=null", "--set", "max_tokens=100")
    finally:
        log.translate_with(None)
    assert "ランは終了しています (100 トークン中 " in japanese and "max_tokens を大きくすると" in japanese
    monkeypatch.delenv("TERAKOYA_LANG")
    export(Path("work/run"), Path("work/model"))
    assert "next: terakoya try work/model" in train(capsys)
    assert "next: terakoya try work/model" in call(capsys, "evaluate", "work/run", "--data", str(store))[2]
    longer = train(capsys, "--set", "max_steps=3")
    assert "is finished" not in longer, "it continues"
    assert longer.endswith("next: terakoya export work/run --out work/model-2\n"), "the model is of an older step"


@pytest.mark.parametrize("key", ["max_steps", "max_tokens", "epochs"])
def test_a_finished_pipeline_names_the_key_that_continues_it(key: str, tmp_path: Path) -> None:
    lengths = {"max_steps": None, "max_tokens": None, "epochs": None, key: 9}
    (tmp_path / "parameters.json").write_text(json.dumps(lengths))
    pipeline = Pipeline(
        corpus=("a.txt",), tokenizer_folder=Path("t"), store=Path("s"), parameters={}, run=tmp_path, export=Path("m")
    )  # fmt: skip
    said = run_command._say_finished(pipeline)
    assert f"a larger value of {key} in the parameters" in said and 'another folder as "export"' in said


def test_an_export_gets_a_name_that_is_free(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert next_command.export_words(run)[-1] == tmp_path / "model"
    (tmp_path / "model").mkdir()
    (tmp_path / "model-2").mkdir()
    assert next_command.export_words(run / "checkpoints/step-00000002")[-1] == tmp_path / "model-3"


def test_a_store_gets_a_name_that_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    next_command.after_tokenizer(tmp_path / "extended", ["c.txt"])
    assert f"--out {tmp_path}/store-2\n" in capsys.readouterr().err
    next_command.after_tokenizer(tmp_path / "extended", ["c.txt"], ["--clean", "clean.json"])
    assert capsys.readouterr().err.endswith("--clean clean.json\n"), "the store is cleaned as the tokenizer's text"
