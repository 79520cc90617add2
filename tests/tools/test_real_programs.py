"""tools/real_input/programs: a toy of it in this environment, and how names are read and counted."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_modules import load_tool

import terakoya

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "real_input" / "programs"
EXPORTERS = "tests/plugins/formats/test_exporters_for_other_programs.py"
SENTENCES = (
    ("山田花子は京都へ行った。", "山田/姓 花子/名 は 京都/地 へ 行っ た 。"),
    ("雨の東京都で鈴木が待つ。", "雨 の 東京/地 都/地 で 鈴木/姓 が 待つ 。"),
    ("ｶﾞｽと電気の話だ。", "ｶﾞｽ と 電気 の 話 だ 。"),
)
SPEECH = {"姓": "人名-姓", "名": "人名-名", "地": "地名-一般"}


@pytest.fixture(scope="module")
def entities() -> Any:
    return load_tool("real_input/programs/entities")


def write_names(folder: Path) -> Path:
    """Two CoNLL-U files with `SENTENCES`."""
    blocks = []
    for text, words in SENTENCES:
        rows = [f"# text = {text}"]
        for number, word in enumerate(words.split(), 1):
            form, _, mark = word.partition("/")
            speech = f"名詞-固有名詞-{SPEECH[mark]}" if mark else "名詞-普通名詞-一般"
            rows.append("\t".join([str(number), form, "_", "X", speech, *"_" * 5]))
        blocks.append("\n".join(rows))
    folder.mkdir()
    for part in ("dev", "test"):
        (folder / f"toy-{part}.conllu").write_text("\n\n".join(blocks) + "\n\n", encoding="utf-8")
    return folder


def test_neighbouring_proper_nouns_of_a_kind_are_one_name(entities: Any, tmp_path: Path) -> None:
    sentences = list(entities.read(write_names(tmp_path / "names") / "toy-dev.conllu"))
    assert [each.text for each in sentences] == [text for text, _ in SENTENCES]
    assert [list(each.spans) for each in sentences] == [
        [(0, 4, "PER"), (5, 7, "LOC")], [(2, 5, "LOC"), (6, 8, "PER")], [],
    ]  # fmt: skip


def test_a_token_gets_the_label_of_the_name_that_it_overlaps(entities: Any) -> None:
    text, offsets = "山田花子は京都", [(0, 0), (0, 2), (2, 5), (4, 5), (5, 7), (0, 0)]

    def tokenizer(text: str, **_: bool) -> dict[str, Any]:
        return {"input_ids": [2, 5, 6, 7, 8, 3], "offset_mapping": offsets, "special_tokens_mask": [1, 0, 0, 0, 0, 1]}

    encoded = entities.encode(entities.Sentence(text, [(0, 4, "PER"), (5, 7, "LOC")]), tokenizer)
    names = [None if label == -100 else entities.LABELS[label] for label in encoded.pop("labels")]
    assert names == [None, "B-PER", "I-PER", "O", "B-LOC", None] and set(encoded) == {"input_ids"}


def test_a_span_counts_with_its_bounds_and_kind(entities: Any) -> None:
    wanted = [[(0, 4, "PER"), (5, 7, "LOC")], [(2, 5, "LOC")]]
    found = [[(0, 4, "PER"), (5, 6, "LOC")], [(2, 5, "PER")]]
    assert entities.score(found, wanted) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert entities.score([[], [(2, 5, "LOC")]], wanted) == pytest.approx((1, 1 / 3, 1 / 2))
    assert entities.score([[], []], wanted) == (0, 0, 0)


@pytest.mark.parametrize(
    ("word", "text", "is_same"),
    [
        ("東京 都", "東京都", True), ("ガス", "ｶﾞｽ", True), ("[UNK] 都", "東京都", True), ("東京", "東京都", False),
        ("[UNK]", "", False), ("京都", "東京", False), ("##京 都", "京都", True),
    ],
)  # fmt: skip
def test_a_word_of_the_pipeline_is_compared_with_its_text(entities: Any, word: str, text: str, is_same: bool) -> None:
    assert entities.is_text_of(word, text) is is_same


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_toy_serves_in_the_programs_that_are_installed(
    tmp_path: Path, forks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_tool("real_input/programs/run")

    def run_in_this_process(command: list[Any], **_: Any) -> Any:
        """Runs a script as `python SCRIPT` does, without another interpreter."""
        monkeypatch.setattr(sys, "argv", [str(each) for each in command[1:]])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(command[1]), run_name="__main__")
        return SimpleNamespace(returncode=ended.value.code or 0)

    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=run_in_this_process))
    corpus = tmp_path / "corpus.txt"
    text = (Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt").read_text(encoding="utf-8")
    corpus.write_text(text[:9000], encoding="utf-8")
    names = write_names(tmp_path / "names")
    out = tmp_path / "out"
    assert run.main([str(corpus), str(out), "--minutes", "0", "--here", "--names", str(names)]) == 0
    said = capsys.readouterr().out
    assert said.count("\nok ") == 4 and "WRONG" not in said
    assert "2 read as they were written, 0 of models or scaled positions that it does not have, 0 not" in said
    for name in ("ONNX Runtime", "sentence-transformers", "llama.cpp"):
        assert f"{name}: ok" in said or f"{name}: skipped" in said
    assert len([line for line in said.splitlines() if " spans are the text between their offsets" in line]) == 2

    assert run.main([str(corpus), str(out), "--minutes", "0", "--recipe", "bert_ja", "--names", str(names)]) == 0
    said = capsys.readouterr().out
    assert said.count("\nok ") == 1 and "pre-trained" in said and "random weights" in said

    monkeypatch.setattr(sys, "argv", ["shares.py", str(out / "bert" / "run")])
    runpy.run_path(str(TOOL.parent / "shares.py"), run_name="__main__")
    assert "bert/store | 64 | 100.00 % |" in capsys.readouterr().out

    weights = load_file(out / "models" / "gpt" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.linspace(0, 0.01, 32)
    save_file(weights, out / "models" / "gpt" / "model.safetensors", metadata={"format": "pt"})
    reader = importlib.import_module("read")
    assert reader.main(out / "models", out / "report.json") == 1
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["bert"] == "ok" and report["gpt"].startswith("logits differ by")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which run.py makes its environments: pip compiles llama.cpp once for all tests."""
    return tmp_path_factory.mktemp("programs") / "out"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_exporters_are_tested_where_the_programs_are(out: Path) -> None:
    """What is skipped elsewhere runs here: every family, and the tokenizers that llama.cpp has."""
    python = load_tool("real_input/programs/run").make_programs(out)
    command = [python, "-m", "pytest", "-q", "-rs", "-m", "", "-p", "no:cacheprovider", EXPORTERS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_toy_serves_in_environments_of_their_own(out: Path, tmp_path: Path) -> None:
    """Makes environments with pip."""
    names = write_names(tmp_path / "names")
    command = [sys.executable, TOOL / "run.py", ROOT / "core" / "terakoya" / "corpus" / "demo_corpus.txt"]
    done = subprocess.run(
        [*command, out, "--minutes", "0", "--names", names, "--transformers", "4.57.6"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    for name, times in (("ONNX Runtime", 1), ("sentence-transformers", 3), ("llama.cpp", 1), ("Optimum", 1)):
        assert done.stdout.count(f"{name}: ok") == times
