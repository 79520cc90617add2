"""`terakoya corpus report`: its figures equal counts made by hand, and it shows no personal data."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terakoya.commands.main import main
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.plugins import load
from terakoya.plugins.families import FAMILIES
from terakoya_cleaning.plan import add_cleaning, make_plan
from terakoya_cleaning.reading import parse_steps
from terakoya_corpus import survey
from terakoya_corpus.counting import DistinctTexts, FrequentKeys, Sampled, count_lengths, quantile
from terakoya_corpus.page import render_page
from terakoya_corpus.report import report_corpus
from terakoya_corpus.scripts import find_scripts

STEPS: list[dict[str, Any]] = [
    {"type": "nfkc"},
    {"type": "length", "min_characters": 12},
    {"type": "characters", "of": "japanese", "min_share": 0.5},
    {"type": "exact_duplicates"},
    {"type": "hold_out", "share": 0.3},
]
SENTENCES = [
    "朝の市場では魚屋が鯵をすすめていた。",
    "図書館の二階には古い地図が並んでいる。",
    "雨が上がると子どもたちは川へ走る。",
]
SECRET = "電話は090-1234-5678、メールはtaro.yamada@mail.example.co.jpです。"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of mixed files: sites with copies and a footer, Shift_JIS, personal data, bad lines."""
    records: list[dict[str, object]] = [
        {"text": f"{SENTENCES[n % 3]}{n % 10}番\nホーム | <b>地図", "url": f"https://www.site{n % 2}.jp/{n}"}
        for n in range(60)
    ]
    lines = [json.dumps(each, ensure_ascii=False) for each in records]
    (tmp_path / "web.jsonl").write_text("\n".join([*lines, '{"text": 5}', f"bad {SECRET}"]), encoding="utf-8")
    (tmp_path / "old.txt").write_bytes("\n\n".join(SENTENCES * 2).encode("cp932"))
    (tmp_path / "english.txt").write_text("short\n\nThe quick brown fox jumps over <div>it</div>.", encoding="utf-8")
    (tmp_path / "mails.csv").write_text("text\n" + "".join(f"{n} {SECRET}\n" for n in range(5)), encoding="utf-8")
    return tmp_path


def test_the_figures_equal_counts_made_by_hand(folder: Path) -> None:
    report = report_corpus(Corpus([folder]))
    texts = [json.loads(line)["text"] for line in (folder / "web.jsonl").read_text("utf-8").splitlines()[:60]]
    texts += [*SENTENCES * 2, "short", "The quick brown fox jumps over <div>it</div>."]
    texts += [f"{n} {SECRET}" for n in range(5)]
    assert report["documents"] == len(texts)
    assert report["characters"] == sum(map(len, texts))
    assert report["scripts"] == {"Japanese": len(texts) - 2, "Latin": 2}
    assert report["duplicates"]["documents"] == len(texts) - len(set(texts))
    assert report["duplicates"]["share"] == report["duplicates"]["documents"] / len(texts)
    assert report["damage"] == {"remains of HTML": 1}
    assert report["rejected"] == {"field is not a string": 1, "bad JSON": 1}
    assert report["lines"]["repeated"][0] == {"times": 60, "text": "ホーム | <b>地図"}
    encodings = {Path(each["name"]).name: each["encoding"] for each in report["files"]}
    assert encodings["old.txt"] == "Shift_JIS (cp932)" and encodings["web.jsonl"] == "UTF-8"
    groups = {each["name"]: each for each in report["duplicates"]["groups"]}
    assert groups["site0.jp"]["documents"] == groups["site1.jp"]["documents"] == 30
    of_sites = Counter(n % 2 for n in range(60) if texts[n] in texts[:n])
    assert of_sites.total() == 30
    assert [groups[f"site{n}.jp"]["duplicates"] for n in range(2)] == [of_sites[0], of_sites[1]]
    assert sum(report["lengths"]["documents"]) == len(texts)
    assert report["lengths"]["quantiles"]["0.5"] == sorted(map(len, texts))[len(texts) // 2]


def test_steps_drop_as_many_as_the_cleaning_does(folder: Path, tmp_path: Path) -> None:
    report = report_corpus(Corpus([folder]), STEPS)
    steps = parse_steps(STEPS, source="clean")
    counts = make_plan(add_cleaning(Corpus([folder]), steps, tmp_path / "plan"))
    found = report["cleaning"]
    assert {f"dropped by {each['name']}": each["dropped"] for each in found["steps"]} == {
        name: count for name, count in counts.items() if name.startswith("dropped by")
    }
    assert (found["documents"], found["kept"], found["held_out"]) == tuple(
        counts[name] for name in ("documents", "kept", "held out")
    )
    assert found["steps"][0]["examples"][0]["reason"] == "5 characters"


@pytest.mark.parametrize("sample", [16_000_000, 10_000])
def test_the_report_is_the_same_for_any_number_of_processes(folder: Path, sample: int) -> None:
    corpus = Corpus([folder], block_bytes=500)
    one = report_corpus(corpus, STEPS, sample_characters=sample)
    assert one == report_corpus(corpus, STEPS, sample_characters=sample, processes=2)
    assert one["sample"]["is_all"] == (sample > 10_000)


def test_a_sample_estimates_the_shares_of_all() -> None:
    texts = DistinctTexts(capacity=1000, sample_characters=1 << 40)
    draw = random.Random(0)
    hashes = [(each, "a") for each in (draw.getrandbits(64) for _ in range(8000)) for _ in range(1 + each % 4)]
    draw.shuffle(hashes)
    for start in range(0, len(hashes), 500):
        part = hashes[start : start + 500]
        texts.add(part, {each: Sampled(("f", 1), "x") for each, _ in part})
    assert not texts.is_exact and 300 < len(list(texts.sample())) <= 1000
    counts = Counter(each for each, _ in hashes)
    assert all(count == counts[each] for each, count, _ in texts.sample())
    expected = 1 - len(counts) / len(hashes)
    assert abs(texts.duplicates().total() / texts.counted - expected) < 0.05


def test_counts_in_bounded_memory_are_as_exact_as_they_say() -> None:
    draw, keys, true = random.Random(0), FrequentKeys(100), Counter[str]()
    for _ in range(50):
        part = Counter(f"{int(draw.paretovariate(0.7))}" for _ in range(200))
        true.update(part)
        keys.add(part)
    assert len(keys.counts) <= 100 < len(true)
    assert all(true[key] - keys.error <= count <= true[key] for key, count in keys.counts.items())
    lengths = np.array([int(draw.lognormvariate(6, 2)) for _ in range(5000)])
    for share in (0.01, 0.5, 0.99):
        assert quantile(count_lengths(lengths), share) == pytest.approx(np.quantile(lengths, share), rel=1 / 16, abs=1)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("これは日本語です。", "Japanese"),
        ("ｶﾀｶﾅ", "Japanese"),
        ("这是中文的句子", "Han characters without kana"),
        ("한국어 문장", "Korean"),
        ("Ceci n'est pas écrit en français", "Latin"),
        ("Это русский", "Cyrillic"),
        ("12 + 34 = 46 ※", "no letters"),
        ("PythonのコードをPyPIへupload", "Japanese"),
        ("The word 東京 means Tokyo", "Latin"),
    ],
)
def test_the_script_of_a_text(text: str, script: str) -> None:
    assert find_scripts([text, "x"])[0] == Counter([script]) + Counter(["Latin"])


def test_damaged_text_is_counted() -> None:
    recoded = "これは日本語の文章です。".encode().decode("cp932", "replace")
    latin = "これは日本語の文章です。".encode().decode("latin-1")
    damage = find_scripts([recoded, latin, "a\0b", "&nbsp;x", "a < b & c", "縺"])[1]
    assert damage["probably mojibake"] == 2 and damage["remains of HTML"] == 1
    assert damage["control characters"] == 1


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_and_shows_no_personal_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-12])
    (folder / "clean.json").write_text(json.dumps(STEPS))
    arguments = ["corpus", "report", str(folder), "--clean", str(folder / "clean.json"), "--processes", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--out", str(folder / "page.html")])
    shown = capsys.readouterr()
    page = (folder / "page.html").read_text("utf-8")
    parser = _Page()
    parser.feed(page)
    assert not parser.open and not parser.addresses and "<script" not in page
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    printed = capsys.readouterr().out
    assert json.loads(printed)["documents"] == 73
    for text in (shown.out, shown.err, page, printed):
        assert "1234" not in text and "yamada" not in text
    assert "broken.jsonl.gz: expected a whole gzip file" in shown.err and "expected a whole gzip file" in page
    assert "next: terakoya tokenizer train" in shown.err
    assert "ホーム | &lt;b&gt;地図" in page and "<b>地" not in page


STRANGE = """
from terakoya import hookimpl
from terakoya.components import CleaningStep

class Telephones(CleaningStep):
    def count(self, text):
        return {"phone": text.count("090-")}

    def show(self, excerpt):
        return excerpt.replace("市場", "[PLACE]")

class Language(CleaningStep):
    languages: tuple[str, ...] = ("ja",)

    def keeps(self, text):
        return self.why(text) in self.languages

    def why(self, text):
        return "en" if text.isascii() else "ja"

@hookimpl
def register_cleaning_steps():
    return {"personal_data": Telephones, "language": Language}
"""


def test_personal_data_and_languages_are_counted_by_the_steps_that_plugins_have(
    folder: Path, tmp_path: Path, fresh_plugins: None
) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    load([str(tmp_path / "strange.py")], without=[each for each in ("screening", "filters") if each in FAMILIES])
    report = report_corpus(Corpus([folder]), STEPS)
    assert report["personal_data"] == {"phone": {"documents": 5, "share": 5 / 73, "found": 5}}
    assert report["languages"] == {"ja": 71, "en": 2}
    page = render_page(report)
    assert "[PLACE]" in page and "市場" not in page


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "expected at least one document, got an empty corpus"), (b"\x1f\x8b broken", "expected a whole gzip file")],
)
def test_a_corpus_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    name = "a.jsonl.gz" if content else "a.txt"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        report_corpus(Corpus([tmp_path]))


def test_a_report_of_rejects_alone_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("bad\n")
    report = report_corpus(Corpus([tmp_path]), STEPS)
    assert (report["documents"], report["rejected"]) == (0, {"bad JSON": 1})
    assert "bad JSON" in render_page(report)


def test_duplicates_are_estimated_where_texts_are_too_many_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "TEXTS", 300)
    texts = [f"{SENTENCES[n % 3]}{n % 900}" for n in range(1200)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    found = report_corpus(Corpus([tmp_path]))["duplicates"]
    assert not found["is_exact"] and found["counted"] < 600
    assert found["share"] == pytest.approx(0.25, abs=0.06)
    assert found["groups"][0]["duplicates"] == pytest.approx(300, rel=0.35)
