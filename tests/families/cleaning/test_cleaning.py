"""Cleaning: each step does what it promises; the result is the same for any number of processes and after a kill."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.errors import UserError
from terakoya.plugins import load, registry
from terakoya.preparation.sharding import Shard
from terakoya_cleaning import deduplication
from terakoya_cleaning import plan as cleaning_plan
from terakoya_cleaning.plan import add_cleaning, make_plan, write_shard
from terakoya_cleaning.reading import apply_steps, parse_steps
from terakoya_cleaning.sentences import split_sentences

KANJI = "日月火水木金土山川田人口目耳手足力気天空雨花草虫犬竹糸貝車町村森林石音先生学校文字本名赤青白"


def text(seed: int, size: int = 200) -> str:
    return "".join(random.Random(seed).choices(KANJI, k=size))


def write(folder: Path, texts: list[str]) -> Corpus:
    """Two files, the second compressed; a bad line in each."""
    rows = [json.dumps({"text": each}, ensure_ascii=False) for each in texts]
    half = len(rows) // 2
    (folder / "a.jsonl").write_text("\n".join(["bad", *rows[:half]]), encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(["bad", *rows[half:]]).encode()))
    return Corpus([folder / "a.jsonl", folder / "b.jsonl.gz"])


def read(corpus: Corpus, *, block_bytes: int = 1 << 20) -> list[str]:
    items = [item for block in corpus.blocks(block_bytes=block_bytes) for item in corpus.read(block)]
    assert sum(isinstance(item, Reject) for item in items) == 2
    return [item.text for item in items if isinstance(item, Document)]


def run(corpus: Corpus, steps: list[dict[str, Any]], *, held_out: bool = False, processes: int = 1) -> list[str]:
    folder = Path(str(corpus.sources[0])).parent / "clean"
    corpus = add_cleaning(corpus, parse_steps(steps, source="clean"), folder, held_out=held_out)
    make_plan(corpus, processes=processes)
    return read(corpus, block_bytes=500)


# ---------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("step", "dropped"),
    [
        ({"type": "length", "min_characters": 5}, {"abc", "日本"}),
        ({"type": "length", "max_characters": 5}, {"これは日本語です。", "Latin only, 12", "0123456789"}),
        ({"type": "characters", "of": "japanese", "min_share": 0.5}, {"abc", "Latin only, 12", "0123456789"}),
        ({"type": "characters", "of": "kana", "max_share": 0.5}, {"これは日本語です。"}),
        ({"type": "characters", "of": "digits", "max_share": 0.1}, {"Latin only, 12", "0123456789"}),
        ({"type": "characters", "of": "latin", "max_share": 0.9}, {"abc"}),
        (
            {"type": "characters", "of": "kanji", "min_share": 1},
            {"abc", "これは日本語です。", "Latin only, 12", "0123456789"},
        ),
    ],
)
def test_filters_drop_the_documents_outside_their_limits(
    tmp_path: Path, step: dict[str, Any], dropped: set[str]
) -> None:
    texts = ["abc", "日本", "これは日本語です。", "Latin only, 12", "0123456789"]
    assert run(write(tmp_path, texts), [step]) == [each for each in texts if each not in dropped]


def test_each_step_reads_the_output_of_the_previous_steps(tmp_path: Path) -> None:
    texts = ["ＡＢＣ", "ABC", "ﾊﾝｶｸ", "ハンカク"]
    corpus = write(tmp_path, texts)
    nfkc, exact = {"type": "nfkc"}, {"type": "exact_duplicates"}
    assert run(corpus, [nfkc, exact]) == ["ABC", "ハンカク"]
    assert run(corpus, [exact, nfkc]) == ["ABC", "ABC", "ハンカク", "ハンカク"]
    latin = {"type": "characters", "of": "latin", "max_share": 0}
    assert run(corpus, [latin, exact]) == ["ﾊﾝｶｸ", "ハンカク"]


@pytest.mark.parametrize("documents_per_pass", [2_000_000, 7])
def test_the_first_of_equal_documents_is_kept(
    tmp_path: Path, documents_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deduplication, "_DOCUMENTS_PER_PASS", documents_per_pass)
    texts = [text(random.Random(n).randrange(20)) for n in range(100)]
    assert run(write(tmp_path, texts), [{"type": "exact_duplicates"}]) == list(dict.fromkeys(texts))


def test_near_duplicates_are_dropped_and_others_are_kept(tmp_path: Path) -> None:
    originals = [text(n) for n in range(30)]
    near = [each[:100] + "変" + each[101:] for each in originals[:10]]  # 5 of 196 n-grams differ
    half = [each[:125] + text(n + 500, 75) for n, each in enumerate(originals[10:20])]
    texts = [*originals, *near, *half, "短い", "短い", "短文"]
    kept = run(write(tmp_path, texts), [{"type": "near_duplicates"}])
    assert kept == [*originals, *half, "短い", "短文"]
    half_is_enough = run(write(tmp_path, texts), [{"type": "near_duplicates", "threshold": 0.3}])
    assert half_is_enough == [*originals, "短い", "短文"]


def test_candidates_of_the_index_are_checked_again(tmp_path: Path) -> None:
    originals = [text(n) for n in range(25)]
    alike = [each[:158] + text(n + 500, 42) for n, each in enumerate(originals)]  # 154 of 238 n-grams in common
    texts = [*originals, *alike]
    assert run(write(tmp_path, texts), [{"type": "near_duplicates"}]) == texts


def test_the_same_text_is_never_both_held_out_and_kept(tmp_path: Path) -> None:
    texts = [text(random.Random(n).randrange(100), 40) for n in range(600)]
    steps: list[dict[str, Any]] = [{"type": "hold_out", "share": 0.3}]
    corpus = write(tmp_path, texts)
    train, held = run(corpus, steps), run(corpus, steps, held_out=True)
    assert sorted(train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert 0.15 < len(set(held)) / 100 < 0.45
    other = run(corpus, [{**steps[0], "seed": 1}], held_out=True)
    assert set(other) != set(held)
    with pytest.raises(UserError, match="held_out: expected a step"):
        run(corpus, [{"type": "nfkc"}], held_out=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("今日は晴れ。明日は雨！本当？", "今日は晴れ。\n明日は雨！\n本当？"),
        ("「はい。そうです。」と答えた。次へ。", "「はい。そうです。」と答えた。\n次へ。"),
        ("「閉じない。次の文。", "「閉じない。\n次の文。"),
        ("It is 3.5 m. Very long! e.g. this", "It is 3.5 m.\nVery long! e.g. this"),
        ("句点なし\n\n 二行目。 ", "句点なし\n\n二行目。"),
        ("えっ！？まさか……。はい", "えっ！？\nまさか……。\nはい"),
    ],
)
def test_sentences_become_lines(before: str, after: str) -> None:
    assert split_sentences(before) == after


@given(st.text(st.sampled_from("あ「」。！.A \n(")))
def test_splitting_loses_nothing_but_white_space(before: str) -> None:
    after = split_sentences(before)
    assert "".join(after.split()) == "".join(before.split())
    assert split_sentences(after).replace("\n", "") == after.replace("\n", "")


def test_apply_steps_applies_all_steps_in_order() -> None:
    steps = parse_steps([{"type": "nfkc"}, {"type": "sentences"}], source="clean")
    assert apply_steps(steps, "ｱ｡ｲ!ウ") == "ア。\nイ!ウ"
    assert unicodedata.normalize("NFKC", "ｱ") == "ア"


# ----------------------------------------------------------------------------------------------------------- whole

ALL: list[dict[str, Any]] = [
    {"type": "nfkc"},
    {"type": "length", "min_characters": 3},
    {"type": "characters", "of": "japanese", "min_share": 0.5},
    {"type": "exact_duplicates"},
    {"type": "near_duplicates", "permutations": 64},
    {"type": "sentences"},
    {"type": "hold_out", "share": 0.2},
]


def _mixture() -> list[str]:
    texts = [text(n % 60, 8_000 + n % 60) for n in range(120)] + ["短"] * 5 + ["latin text"] * 5
    texts += [each[:4000] + "違" + each[4001:] for each in texts[:20]]
    random.Random(0).shuffle(texts)
    return texts


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".u8", ".json", ".jsonl")}


def test_the_result_does_not_depend_on_processes_or_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write(tmp_path, _mixture())
    steps = parse_steps(ALL, source="clean")
    with caplog.at_level(logging.INFO, "terakoya"):
        counts = make_plan(add_cleaning(corpus, steps, tmp_path / "one"))
    assert counts == {
        "documents": 150,
        "dropped by length": 5,
        "dropped by characters (japanese)": 5,
        "dropped by exact_duplicates": 60,
        "dropped by near_duplicates": 20,
        "held out": counts["held out"],
        "kept": 60 - counts["held out"],
    }
    assert "cleaning: length dropped 5 of 150 documents\n    " in caplog.text
    assert caplog.text.count(": 短\n") == 3
    assert re.search(rf"cleaning: {counts['held out']} documents held out(\n    \S+:\d+: .+){{3}}", caplog.text)
    assert make_plan(add_cleaning(corpus, steps, tmp_path / "two"), processes=2) == counts
    files = _files(tmp_path / "one")
    assert files == _files(tmp_path / "two")

    written: list[int] = []
    write_part = cleaning_plan._PartWriter.write_part

    def interrupted(self: cleaning_plan._PartWriter, number: int, block: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(number)
        write_part(self, number, block)

    monkeypatch.setattr(cleaning_plan._PartWriter, "write_part", interrupted)
    for _ in range(20):
        try:
            make_plan(add_cleaning(corpus, steps, tmp_path / "three"))
            break
        except KeyboardInterrupt:
            before_interrupt = written[:]
            written.clear()
    assert before_interrupt
    assert _files(tmp_path / "three") == files


def test_each_dropped_document_and_bad_line_is_listed(tmp_path: Path) -> None:
    texts = ["あ", "いいいい", "abcd", "いいいい", "ろろろろ"]
    corpus = write(tmp_path, texts)
    steps = [{"type": "length", "min_characters": 2}, {"type": "characters", "of": "kana", "min_share": 0.5}]
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("\nbad")
    clean = parse_steps([*steps, {"type": "exact_duplicates"}], source="clean")
    make_plan(add_cleaning(corpus, clean, tmp_path / "clean"))
    listed = [json.loads(line) for line in (tmp_path / "clean" / "rejects.jsonl").read_bytes().splitlines()]
    first, second = map(str, corpus.sources)
    assert [tuple(each.values()) for each in listed] == [
        (None, "bad JSON", first, 1, None),
        ("length", "1 character", first, 2, 1),
        (None, "bad JSON", first, 4, None),
        (None, "bad JSON", second, 1, None),
        ("characters (kana)", "0 of 4 characters", second, 2, 4),
        ("exact_duplicates", "compared with the other documents", second, 3, 4),
    ]
    assert list(listed[0]) == ["step", "reason", "file", "line", "characters"]


def test_a_plan_of_other_settings_or_another_corpus_is_not_used(tmp_path: Path) -> None:
    corpus = write(tmp_path, ["一", "二二", "三三三"])
    steps = [{"type": "length", "min_characters": 2}]
    assert run(corpus, steps) == ["二二", "三三三"]
    assert run(corpus, [{"type": "length", "min_characters": 3}]) == ["三三三"]
    corpus = write(tmp_path, ["一一一", "二二", "三三三"])
    assert run(corpus, [{"type": "length", "min_characters": 3}]) == ["一一一", "三三三"]
    prints = {
        add_cleaning(corpus, parse_steps(each, source=""), tmp_path).fingerprint
        for each in ([{"type": "length", "min_characters": n}] for n in (2, 3))
    }
    assert len(prints | {corpus.fingerprint}) == 3


def test_a_plan_that_is_replaced_while_it_is_in_use_is_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path, ["一", "二二", "三三三"])
    first, second = (
        add_cleaning(corpus, parse_steps([{"type": "length", "min_characters": n}], source=""), tmp_path / "clean")
        for n in (2, 3)
    )
    make_plan(first)
    assert read(first) == ["二二", "三三三"]
    make_plan(second)
    with pytest.raises(UserError, match=r"replaced by another command while it was in use; .* own --clean-folder"):
        read(first)
    assert read(second) == ["三三三"]


def test_a_file_that_changes_while_the_plan_is_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, write_parts = write(tmp_path, ["一", "二二"]), cleaning_plan._write_parts

    def changing(*arguments: Any) -> None:
        write_parts(*arguments)
        with (tmp_path / "a.jsonl").open("a") as stream:
            stream.write("\n")

    monkeypatch.setattr(cleaning_plan, "_write_parts", changing)
    with pytest.raises(UserError, match="a file was changed while it was read"):
        run(corpus, [{"type": "nfkc"}])
    assert not (tmp_path / "clean" / "plan.json").exists() and not (tmp_path / "clean" / ".cleaning").exists()


def test_files_of_a_user_in_the_folder_of_the_plan_stay(tmp_path: Path) -> None:
    folder = tmp_path / "clean"
    mine = folder / "parts" / "text.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    corpus = write(tmp_path, ["一", "二二"])
    steps = [{"type": "length", "min_characters": 2}]
    run(corpus, steps)
    assert mine.read_text() == "mine" and not (folder / ".cleaning").exists()
    for other in ("{}", "[]", "x"):
        (folder / "plan.json").write_text(other)
        with pytest.raises(UserError, match=r"plan\.json: expected a plan of cleaning, got another file"):
            run(corpus, steps)
        assert (folder / "plan.json").read_text() == other


def test_an_existing_plan_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write(tmp_path, ["一", "二二"])
    steps: list[dict[str, Any]] = [{"type": "length", "min_characters": 2}, {"type": "hold_out", "share": 0.5}]
    run(corpus, steps)
    monkeypatch.setattr(cleaning_plan, "_write_parts", None)
    run(corpus, steps, held_out=True)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [{"type": "nfcc"}],
            '0.type: expected one of NAMES, got "nfcc"; did you mean "nfkc"?',
        ),
        ([{"type": "length", "min": 3}], '0.min: unknown key; did you mean "min_characters"?'),
        (
            [{"type": "length", "min_chars": 2}],
            '0.min_chars: unknown key; did you mean "min_characters" or "max_characters"?',
        ),
        (
            [{"type": "nfkc"}, {"type": "length", "min_characters": "x"}],
            '1.min_characters: expected an integer, got "x"',
        ),
        ([{"type": "hold_out"}], "0.share: missing"),
        ([{"type": "nfkc"}, {"type": "nfkc"}], "nfkc: expected once, got it twice"),
        (
            [{"type": "hold_out", "share": 0.1}, {"type": "nfkc"}],
            "hold_out: expected as the last step, so that held-out documents are clean too",
        ),
        ([], "expected a list of one cleaning step or more, got []"),
        ({"clean": []}, 'expected a list of one cleaning step or more, got {"clean": []}'),
    ],
)
def test_wrong_steps_are_refused(steps: Any, message: str) -> None:
    """The error is one line with the file and the position in its list, and it contains only keys of the file."""
    with pytest.raises(UserError) as refused:
        parse_steps(steps, source="c2.json")
    names = ", ".join(registry().names("cleaning_steps"))
    assert str(refused.value) == f"c2.json: {message}".replace("NAMES", names)


def test_wrong_steps_among_other_settings_are_reported_with_their_whole_path() -> None:
    steps = [{"type": "length", "min": 3}, {"type": "nfkc", "form": "C"}]
    with pytest.raises(UserError) as refused:
        parse_steps(steps, source="pipeline: corpora.wiki.clean")
    assert [line.partition(";")[0] for line in str(refused.value).split("\n")] == [
        "pipeline: corpora.wiki.clean.0.min: unknown key",
        "pipeline: corpora.wiki.clean.1.form: unknown key",
    ]


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    corpus = Corpus([tmp_path / "a.txt", tmp_path / "a.txt"])
    with pytest.raises(UserError, match=r"a\.txt: is given twice"):
        add_cleaning(corpus, parse_steps([{"type": "nfkc"}], source=""), tmp_path / "clean")


def test_unfinished_parts_of_other_settings_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write(tmp_path, ["一", "二二", "三三三"])
    with monkeypatch.context() as patch:
        patch.setattr(cleaning_plan, "_write_plan", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(corpus, [{"type": "length", "min_characters": 2}])
    assert list((tmp_path / "clean" / ".cleaning").glob("*.npy"))
    assert run(corpus, [{"type": "length", "min_characters": 3}]) == ["三三三"]


def test_shards_of_a_plan_make_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, files, start = _mixture(), [], 0
    for name, stop in (("c", 10), ("a", 11), ("d", 60), ("b", 150)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": each}) + "\n" for each in texts[start:stop]))
        start = stop
    corpus, steps = Corpus(files), parse_steps(ALL, source="clean")
    make_plan(add_cleaning(corpus, steps, tmp_path / "whole"))
    read = set()
    for number in (1, 2, 3):
        piece = tmp_path / f"shard{number}"
        write_shard(add_cleaning(corpus, steps, piece), Shard(number, 3))
        names = {file.name for file in (piece / ".cleaning").glob("*.npy")}
        assert not names & read
        read |= names
        shutil.copytree(piece, tmp_path / "joined", dirs_exist_ok=True)
    monkeypatch.setattr(cleaning_plan._PartWriter, "write_part", lambda *_: pytest.fail("a document is read again"))
    make_plan(add_cleaning(corpus, steps, tmp_path / "joined"))
    assert _files(tmp_path / "joined") == _files(tmp_path / "whole")


KILLED = """
import sys
from pathlib import Path
from terakoya_cleaning.plan import add_cleaning, make_plan
from terakoya_cleaning.reading import parse_steps
from terakoya.corpus.corpus import Corpus

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    steps = parse_steps([{"type": "near_duplicates", "permutations": 256}], source="")
    corpus = Corpus([folder / "a.jsonl", folder / "b.jsonl.gz"])
    make_plan(add_cleaning(corpus, steps, folder / "killed"), processes=2)
"""


@pytest.mark.nightly
def test_after_a_kill_no_worker_remains_and_the_same_plan_is_made(tmp_path: Path) -> None:
    corpus = write(tmp_path, [text(n, 20_000) for n in range(100)])
    script = tmp_path / "make.py"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, script, tmp_path], env={**os.environ, "OMP_NUM_THREADS": "1"})
    parts = tmp_path / "killed" / ".cleaning"
    while not list(parts.glob("*.npy")):
        assert process.poll() is None
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not (tmp_path / "killed" / "plan.json").exists()
    steps = parse_steps([{"type": "near_duplicates", "permutations": 256}], source="")
    for name in ("killed", "whole"):
        make_plan(add_cleaning(corpus, steps, tmp_path / name))
    assert _files(tmp_path / "killed") == _files(tmp_path / "whole")


STRANGE = """
import numpy as np
from terakoya import hookimpl
from terakoya.components import CleaningStep

class Longest(CleaningStep):
    kept: int = 2

    @property
    def reason(self):
        return f"the {self.kept} longest stay"

    @property
    def note_type(self):
        return np.dtype("<i4")

    def note(self, text):
        return len(text)

    def drop(self, notes, left):
        lengths = np.where(left, np.concatenate(notes), -1)
        return np.setdiff1d(np.flatnonzero(left), np.argsort(-lengths, kind="stable")[: self.kept])

@hookimpl
def register_cleaning_steps():
    return {"longest": Longest}
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_of_a_plugin_compares_documents_between_bundled_steps(
    tmp_path: Path, fresh_plugins: None, processes: int
) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    load([str(tmp_path / "strange.py")])
    steps: list[dict[str, Any]] = [{"type": "exact_duplicates"}, {"type": "longest"}]
    steps.append({"type": "length", "max_characters": 4})
    assert run(write(tmp_path, ["一", "四四四四", "四四四四", "五五五五五", "二二"]), steps, processes=processes) == [
        "四四四四"
    ]
    counts = json.loads((tmp_path / "clean" / "plan.json").read_bytes())["counts"]
    assert counts == {
        "documents": 5, "dropped by exact_duplicates": 1, "dropped by longest (the 2 longest stay)": 2,
        "dropped by length": 1, "kept": 1,
    }  # fmt: skip
