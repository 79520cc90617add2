"""The Python API: its page runs, events are plain functions, and importing it is cheap."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import terakoya
from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.places import as_fields
from terakoya.plugins.events import EVENTS
from terakoya.plugins.families import FAMILIES
from terakoya.preparation.options import PrepareOptions
from terakoya_evaluation.options import EvaluateOptions
from terakoya_quality.evaluation.options import TaskOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "東京は日本の首都です。\n\n今日はよい天気だったので、川の近くを歩きました。\n\n本を読むのは楽しいことです。\n\n"
    )
    Path("corpus.txt").write_text(text * 30, encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    for path, string in (('Path("work")', '"work/"'), ("work / ", "work + "), ('["corpus.txt"]', '"corpus.txt"')):
        assert path in code
        code = code.replace(path, string)  # which most programs have
    names: dict[str, Any] = {}
    exec(compile(code, "python.md", "exec"), names)
    assert names["result"].step == 4 and sorted(names["losses"]) == [1, 2, 4]
    assert len(capsys.readouterr().out.strip().splitlines()[-3:]) == 3


def test_the_page_names_every_event_and_every_function() -> None:
    described = re.findall(r"^\| `(\w+)` \| `f\((.*?)\)`", PAGE, re.M)
    assert sorted(name for name, _ in described) == sorted(EVENTS)
    for name, arguments in described:
        plugins.registry().hook.with_functions({name: eval(f"lambda {arguments}: None")})
    functions = {name for name, module in terakoya._FUNCTIONS.items() if module != "terakoya.hookspecs"}
    functions |= {name for family in FAMILIES.values() for name in family.functions}
    assert set(re.findall(r"terakoya\.(\w+)\(", PAGE)) == functions


TRAINING: dict[str, Any] = {"settings": {"type": "mecab_wordpiece"}, "clean": "nowhere.json", "clean_folder": "made"}
TUNING: dict[str, Any] = {"train": "nowhere.csv", "eval": "b.csv", "test": "c.csv", "task": "classification"}
CALLS: dict[str, Callable[[], object]] = {
    "prepare": lambda: terakoya.prepare("corpus.txt", tokenizer="nowhere", out="store"),
    "evaluate": lambda: terakoya.evaluate("nowhere", stores="store"),
    "finetune": lambda: terakoya.finetune("nowhere", "out", **TUNING),
    "import_checkpoint": lambda: terakoya.import_checkpoint("nowhere", "out", format="deepspeed", tokenizer="nowhere"),
    "find_replaced": lambda: terakoya.find_replaced("nowhere", "本を読む"),
    "train_tokenizer": lambda: terakoya.train_tokenizer("corpus.txt", "out", **TRAINING),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_string_is_a_path_everywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("今日はよい天気です。\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"^nowhere(\.\w+)?: "):
        CALLS[name]()


def test_options_hold_what_their_fields_say() -> None:
    given = as_fields(EvaluateOptions, {"stores": "a", "corpus": "b", "device": "cpu", "batch_tokens": 2})
    assert given == {"stores": [Path("a")], "corpus": ["b"], "device": "cpu", "batch_tokens": 2}
    assert as_fields(PrepareOptions, {"out": "a", "clean_folder": None}) == {"out": Path("a"), "clean_folder": None}
    assert as_fields(TaskOptions, {"tasks": "jglue", "stores": None}) == {"tasks": ["jglue"], "stores": None}
    assert as_fields(EvaluateOptions, {"stores": ("a", Path("b"))}) == {"stores": [Path("a"), Path("b")]}


def test_parameters_are_given_in_four_ways() -> None:
    raw = json.loads((ROOT / "parameters" / "tiny_bert.json").read_text(encoding="utf-8"))
    content = Parameters.from_dict(raw, source="parameters")
    for given in ("tiny_bert", ROOT / "parameters" / "tiny_bert.json", raw, content):
        assert Parameters.of(given).dump() == content.dump()
        assert Parameters.of(given, "max_steps=7").max_steps == Parameters.of(given, ["max_steps=7"]).max_steps == 7
    assert terakoya.estimate(raw, vocab_size=100, overrides="max_steps=7").steps == 7


def test_wrong_events_are_named() -> None:
    with pytest.raises(UserError, match=r'no event step_finishd; did you mean "step_finished"'):
        terakoya.train("tiny_bert", "run", events={"step_finishd": print})
    with pytest.raises(UserError, match=r"events.step_finished: expected a function of \(run, report\), got .*lambda"):
        terakoya.train("tiny_bert", "run", events={"step_finished": lambda run: None})


def test_events_end_with_the_run() -> None:
    before = plugins.registry()
    with pytest.raises(UserError, match="no such file"):
        terakoya.train("nowhere", "run", events={"run_started": lambda run: None})
    assert plugins.registry() is before


def test_importing_is_cheap() -> None:
    code = "import sys, terakoya; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
