"""Presets: found by name in the sources and in the wheel, listed, and never in the way of a real file."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.commands.main import build_app
from terakoya.config.parameters import Parameters
from terakoya.config.presets import find_parameters, preset_names, presets_folder, read_preset
from terakoya.errors import UserError
from terakoya.training.model.build import build_module
from terakoya_pipeline.run import run_pipeline
from terakoya_pipeline.settings import Pipeline

ROOT = Path(__file__).resolve().parents[3]


def refusal(given: str) -> str:
    with pytest.raises(UserError) as caught:
        find_parameters(given)
    return str(caught.value)


def test_every_preset_says_its_size_and_its_purpose() -> None:
    assert presets_folder() == ROOT / "parameters" and len(preset_names()) > 20
    for name in preset_names():
        preset = read_preset(name)
        assert preset.size[-2:] in (" M", " B") and 20 < len(preset.purpose) < 120, preset


def test_the_list_names_each_preset_with_its_facts() -> None:
    printed = CliRunner().invoke(build_app(), ["parameters", "list"]).output
    row = next(line for line in printed.splitlines() if line.startswith("bert_base "))
    assert row.split()[1:5] == ["bert", "111", "M", "512"] and "encoder" in row
    listed = json.loads(CliRunner().invoke(build_app(), ["parameters", "list", "--json"]).output)
    assert [each["name"] for each in listed] == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_the_stated_size_is_that_of_the_model(name: str) -> None:
    parameters = Parameters.load(Path(name))
    with torch.device("meta"):
        model = build_module(parameters, synthetic_vocabulary(32_768, parameters.data.sequence_length))
    number, unit = read_preset(name).size.split()
    stated = float(number) * {"M": 1e6, "B": 1e9}[unit]
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(stated, rel=0.04)


def test_a_preset_is_read_by_its_name_and_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = Parameters.load(Path("tiny_bert"), ["max_steps=7"])
    assert named == Parameters.load(ROOT / "parameters" / "tiny_bert.json", ["max_steps=7"])
    own = json.loads((ROOT / "parameters" / "tiny_bert.json").read_text(encoding="utf-8")) | {"max_steps": 3}
    Path("tiny_bert").write_text(json.dumps(own), encoding="utf-8")
    assert Parameters.load(Path("tiny_bert")).max_steps == 3


def test_a_pipeline_names_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("一つの文書です。\n", encoding="utf-8")
    settings = {
        "corpus": "text.txt", "tokenizer_folder": "tokenizer", "tokenizer": {"type": "mecab_wordpiece"},
        "store": "store", "run": "run", "export": "model", "hold_out": 1, "validation_store": "val",
    }  # fmt: skip
    run_pipeline(Pipeline.model_validate({**settings, "parameters": "tiny_bert"}))
    with pytest.raises(UserError, match="did you mean tiny_bert"):
        run_pipeline(Pipeline.model_validate({**settings, "parameters": "tiny_brt"}))


def test_names_that_are_no_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean bert_base or " in refusal("bert_bas") and "terakoya parameters list" in refusal("bert_bas")
    assert "did you mean" not in refusal("zzz")
    assert refusal("parameters/bert_base.json").endswith("without folder and ending: bert_base")
    assert find_parameters("mine/bert.json") == Path("mine/bert.json")  # `read_json` says what is at that path


def test_the_wheel_has_the_presets(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from terakoya.config.presets import presets_folder, preset_names, find_parameters\n"
        "print(presets_folder(), len(preset_names()), find_parameters('bert_base').is_file())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(site)], cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.split() == [str(site / "terakoya" / "presets"), str(len(preset_names())), "True"], done.stderr
