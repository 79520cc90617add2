"""The report of runs: what it reads, what it draws, and that the page is self-contained."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import damaged_records
import pytest
import toy
from command_line import call, exit_code, refusal

from terakoya import log
from terakoya.errors import UserError
from terakoya.launch.here import train
from terakoya.runs.metrics import Point
from terakoya_japanese.translate import translator
from terakoya_report.charts import MAX_POINTS, Line, chart, thin_points, ticks
from terakoya_report.page import live_scripts, render_main, render_page
from terakoya_report.report import compare_parameters, read_reports

NOW = 1_800_000_000.0


def make_run(folder: Path, *, learning_rate: float, restart: int | None = None, **more: Any) -> Path:
    """Writes a run of 40 logged steps of 3,600 tokens at 3,600 tokens a second."""
    folder.mkdir(parents=True)
    settings = {"optimizer": {"type": "adamw", "learning_rate": learning_rate}, "seed": 42, "max_steps": 40, **more}
    settings["data"] = {"train": [{"store": "work/a", "weight": 2.0}], "validation": ["work/a.val"]}
    (folder / "parameters.json").write_text(json.dumps(settings))
    start = {
        "kind": "start", "step": 0, "max_steps": 40, "global_rows": 16, "parameter_count": 1234567,
        "world": {"processes": 2, "engine": "ddp", "device": "cpu"}, "devices": {"NVIDIA H200": 2},
        "stores": {"work/a": "f" * 64}, "versions": {"torch": "2.13.0"}, "flops_per_token": 2.5e9, "time": NOW,
    }  # fmt: skip
    records = [
        start,
        {"kind": "validation", "step": 0, "store": "work/a.val", "loss": 9.0, "mlm_loss": 9.0, "time": NOW},
    ]
    for step in range(1, 41):
        if step == restart:
            records.append({"kind": "resume", "step": step - 1, "time": NOW + step})
        rates = {"tokens_per_second": 3600.0, "samples_per_second": 16.0 + step, "mfu": 0.41}
        loss = {"loss": 9.0 - step / 10, "mlm_loss": 9.0 - step / 10, "perplexity": 100.0 - step}
        records.append({"kind": "step", "step": step, "tokens": 3600 * step, **loss, **rates, "time": NOW + step})
    check = {"store": "work/a.val", "loss": 5.5, "mlm_loss": 5.5}
    records.append({"kind": "validation", "step": 40, **check, "time": NOW + 41})
    records.append({"kind": "warning", "text": "<script>alert(1)</script>", "time": NOW + 41})
    records.append({"kind": "finished", "step": 40, "time": NOW + 42})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / "one" / "run", learning_rate=0.1, restart=21),
        make_run(tmp_path / "two" / "run", learning_rate=0.2, frozen_layers=3),
    ]


def test_runs_get_different_labels_and_their_parameters_are_compared(runs: list[Path]) -> None:
    one, two = read_reports(runs, now=NOW + 100)
    assert (one.label, two.label) == ("one/run", "two/run")
    differ, equal = compare_parameters([one, two])
    assert differ == ["optimizer.learning_rate", "frozen_layers"]
    assert "seed" in equal and not set(differ) & set(equal)
    assert compare_parameters([one]) == ([], list(one.parameters))
    assert [report.label for report in read_reports(runs, ["a", "b"])] == ["a", "b"]
    with pytest.raises(UserError, match="expected 2 names, one for each run, got 1"):
        read_reports(runs, ["a"])


def test_facts_of_a_run(runs: list[Path]) -> None:
    facts = read_reports(runs, now=NOW + 100)[0].facts
    assert facts["state"] == "finished" and facts["steps"] == "40 / 40" and facts["tokens"] == "144,000"
    assert facts["processes"] == "2 x NVIDIA H200" and facts["parameters"] == "1,234,567"
    assert facts["samples/s, median"] == "36.5" and facts["MFU, median"] == "41.0%" and facts["restarts"] == "1"
    assert facts["hours of training"] == f"{40 / 3600:.2f}" and facts["GFLOP a token"] == "2.5"
    assert read_reports(runs)[0].stores == [
        {"store": "work/a", "for": "training, weight 2", "documents": "missing", "tokens": "",
         "fingerprint": "f" * 12},
        {"store": "work/a.val", "for": "validation", "documents": "missing", "tokens": "", "fingerprint": ""},
    ]  # fmt: skip


class Reader(HTMLParser):
    """Collects the links, texts and classes of a page, and checks that its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.classes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.classes += [value or "" for name, value in attrs if name == "class"]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("against", ["step", "hours", "tokens"])
def test_the_page_is_self_contained_and_complete(runs: list[Path], against: Any) -> None:
    page = render_page(read_reports(runs, now=NOW + 100), created="today", against=against)
    reader = Reader(page)
    assert reader.open == [] and reader.links == [] and not re.search(r"https?:|@import|url\((?!#plot)", page)
    words = " ".join(reader.words)
    for text in ("one/run", "perplexity", "loss (nats)", "optimizer.learning_rate", "2.13.0", "144,000", "work/a.val"):
        assert text in words, text
    assert "Equal to loss everywhere, not shown: mlm_loss" in words
    assert "<script>alert" not in page and "<script>alert(1)</script>" in html.unescape(page)
    assert reader.classes.count("differs") == 2, "two rows of parameters, no version"
    assert [name for name in reader.classes if name.startswith("restart")] == (
        ["restart run0"] * 5 if against != "tokens" else []
    ), "one in each chart of the run that was resumed"


def test_a_page_of_one_run_and_of_one_that_wrote_nothing(runs: list[Path], tmp_path: Path) -> None:
    alone = render_page(read_reports(runs[:1]), created="today")
    assert "differs" not in Reader(alone).classes and "optimizer.learning_rate" in alone
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.lock").touch()
    text = render_page(read_reports([tmp_path / "empty"]), created="today")
    assert "No run has written a metric yet." in text and "not started" in text


def points(values: list[float]) -> list[Point]:
    return [Point(step, step / 100, value, 10 * step) for step, value in enumerate(values)]


def test_a_curve_is_drawn_where_its_values_are() -> None:
    """The lowest value is lowest on the page, the last point is at the right end of the axis."""
    drawn = chart([Line(0, "a", points([3.0, 1.0, 2.0]), False)], [], title="t", against="step", right=2.0)
    match = re.search(r'polyline points="([^"]+)"', drawn)
    assert match
    places = [tuple(map(float, pair.split(","))) for pair in match[1].split()]
    assert [x for x, _ in places] == [62.0, 345.0, 628.0]
    heights = [y for _, y in places]
    assert heights[1] > heights[2] > heights[0]
    assert heights[2] == pytest.approx((heights[0] + heights[1]) / 2, abs=0.11)


def test_first_steps_far_above_do_not_flatten_the_rest() -> None:
    high = points([50.0, 40.0] + [2.0 + 0.001 * step for step in range(100)])
    drawn = chart([Line(0, "a", high, False)], [], title="t", against="step", right=101.0)
    labels = [float(each) for each in re.findall(r'text-anchor="end">([\d.]+)</text>', drawn) if float(each) < 60]
    assert max(labels) < 3.0


def test_long_curves_keep_their_peaks() -> None:
    values = [float(step % 7) for step in range(50_000)]
    values[31_234], values[777] = 99.0, -99.0
    kept = thin_points(points(values))
    assert len(kept) <= MAX_POINTS and [point.step for point in kept] == sorted({point.step for point in kept})
    assert {99.0, -99.0} <= {point.value for point in kept}
    assert kept[0].step == 0 and kept[-1].step == 49_999


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (2.1, 9.7, [4, 6, 8]), (0, 1549, [0, 500, 1000, 1500]), (3, 3, [3])],
)
def test_ticks_are_round_numbers(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(marks)


def test_the_command_writes_the_file(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reports" / "report.html"
    code, printed, _ = call(capsys, "report", *runs, "--out", out)
    size = round(out.stat().st_size / 1000)
    assert code == 0 and printed == f"wrote {out}: 2 runs, {size} kB\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "expected the folder of a run" in refusal(capsys, "report", tmp_path, "--out", out)


def test_a_report_of_one_run_goes_into_its_folder(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = call(capsys, "report", runs[0])
    assert code == 0 and f"wrote {runs[0] / 'report.html'}: run, " in printed
    assert (runs[0] / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_spikes_and_skipped_steps_are_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", learning_rate=0.1)
    with (folder / "metrics.jsonl").open("a") as file:
        for kind, step, more in (
            ("spike", 12, {"signal": "loss"}),
            ("skipped", 20, {"reason": "not finite"}),
            ("skipped", 30, {"reason": "overflow"}),
        ):
            file.write(json.dumps({"kind": kind, "step": step, "text": f"<{kind}>", "time": NOW, **more}) + "\n")
    (report,) = read_reports([folder], now=NOW)
    page = render_page([report], created="today")
    assert page.count('<path class="anomaly run0"') == 2, "an overflow of fp16 is usual"
    assert "<title>step 12: spike: &lt;spike&gt;</title>" in page
    assert report.facts["spikes"] == "1" and report.facts["skipped steps"] == "2"
    assert 'class="anomaly' not in render_page([report], created="today", against="tokens")


# -------------------------------------------------------------------------------------------------- samples, phases


def test_samples_and_phases_are_tables(tmp_path: Path) -> None:
    stages = {"train": ["work/a"], "stages": [{"from_step": 21, "train": [{"store": "work/b", "weight": 1.0}]}]}
    run = make_run(tmp_path / "run", learning_rate=0.1)
    settings = json.loads((run / "parameters.json").read_text())
    (run / "parameters.json").write_text(json.dumps({**settings, "data": stages}))
    samples = [
        {
            "kind": "sample",
            "step": step,
            "text": "東京は[MASK]です<b>",
            "masks": [[["首都", 0.5], ["<i>", step / 1000]]],
        }
        for step in range(0, 400, 10)
    ]
    discarded = [{"kind": "sample", "step": 500, "text": "x", "continuation": "y"}, {"kind": "resume", "step": 390}]
    again = {"kind": "start", "step": 390, "devices": {"cpu": 2}, "hosts": ["spot-7"], "time": NOW + 90}
    end = {"kind": "stopped", "step": 395, "reason": "SIGTERM"}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in [*samples, *discarded, again, end])
    (report,) = read_reports([run], now=NOW + 100)
    assert sorted(report.samples) == list(range(0, 400, 10))
    assert report.samples[390] == {"東京は[MASK]です<b>": "首都 50% <i> 39%"}
    assert [(each["phase"], each["from step"], each["to step"], each["what"]) for each in report.phases] == [
        ("start 1", "1", "40", "2 x NVIDIA H200; finished"),
        ("start 2", "391", "395", "2 x cpu, spot-7; stopped: SIGTERM"),
        ("data stage 1", "1", "20", "work/a"),
        ("data stage 2", "21", "40", "work/b"),
    ]
    used = [("work/a", "training"), ("work/b", "training, data stage 2, weight 1")]
    assert [(each["store"], each["for"]) for each in report.stores] == used
    own = [{"data": {"train": [each]}} for each in ("work/c", "work/d")]
    for phases, first in (([*own], []), ([{"data": None}, *own], [("work/a", "training")])):
        (run / "parameters.json").write_text(json.dumps({**settings, "data": {"train": ["work/a"]}, "phases": phases}))
        begin = len(phases) - 1
        used = [*first, ("work/c", f"training, phase {begin}"), ("work/d", f"training, phase {begin + 1}")]
        assert [(each["store"], each["for"]) for each in read_reports([run])[0].stores] == used
    page = render_page([report], created="today")
    assert "<b>" not in page and "<i>" not in page and "首都 50% &lt;i&gt; 39%" in page
    shown = re.findall(r"<tr><th>([\d,]+)</th><td>首都", page)
    assert len(shown) <= 13 and (shown[0], shown[-1]) == ("0", "390")


def test_how_long_the_slowest_rank_works_is_a_rate_and_its_number_no_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", learning_rate=0.1)
    slow = {"kind": "step", "step": 41, "loss": 4.9, "slowest_rank": 3, "slowest_rank_excess": 0.25, "time": NOW + 43}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(slow) + "\n")
    losses, _, rates = render_page(read_reports([run]), created="today").partition("<h2>Pace</h2>")
    assert "<h3>how much longer the slowest rank works</h3>" in rates
    assert "<h3>slowest rank" not in losses + rates


def test_bits_are_drawn_for_each_character_and_byte(tmp_path: Path) -> None:
    """Of steps and of validations, with the controls of losses and under a title in words."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "parameters.json").write_text("{}")
    bits = [("bits", 4.0), ("masked_bits", 2.0)]
    values = {
        f"{name}_per_{unit}": value / size for name, value in bits for unit, size in (("character", 1), ("byte", 3))
    }
    both = ({"kind": "step"}, {"kind": "validation", "store": "work/a.val"})
    records = [
        {
            **kind,
            "step": step,
            "tokens": step,
            "time": NOW,
            "loss": 3.0,
            **{n: each / step for n, each in values.items()},
        }
        for step in (1, 2, 4)
        for kind in both
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    page = render_page(read_reports([folder]), created="today")
    for title in ("bits per character", "bits per byte", "masked bits per character", "masked bits per byte"):
        figure = page[page.index(f'<figure class="losses"><h3>{title}</h3>') :].partition("</figure>")[0]
        assert figure.count("<polyline") == 2, "the run and its validation"


def test_a_chart_says_which_dashes_belong_to_which_store(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", learning_rate=0.1)
    assert "<figcaption" not in render_page(read_reports([run], now=NOW + 100), created="today"), "there is one store"
    with (run / "metrics.jsonl").open("a") as file:
        for step in (0, 40):
            record = {"kind": "validation", "step": step, "store": "work/<web>", "loss": 5.0, "time": NOW}
            file.write(json.dumps(record) + "\n")
    page = render_page(read_reports([run], now=NOW + 100), created="today")
    (legend,) = re.findall(r"<h3>loss \(nats\)</h3>.*?<figcaption[^>]*>(.*?)</figcaption>", page)
    assert re.findall(r'<span class="(dash\d)">.*?</svg>([^<]*)</span>', legend) == [
        ("dash0", "a.val"), ("dash1", "&lt;web&gt;"),
    ]  # fmt: skip
    assert Reader(page).open == []


def test_the_page_is_japanese_where_the_user_has_chosen_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", learning_rate=0.1, restart=21)
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    japanese = translator()
    monkeypatch.setattr(log, "_translate", japanese)
    page = render_page(read_reports([tmp_path / "run"]), created="2026-01-01", live_every=5.0, language="ja")
    assert '<html lang="ja">' in page and "<title>ランのレポート: run</title>" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings and not [each for each in headings if re.search("[a-z]{3}", each)]
    heads = [each for row in re.findall("<thead>(.*?)</thead>", page) for each in re.findall("<th>(.*?)</th>", row)]
    assert not [each for each in heads if re.search("[a-z]{3}", each) and each != "run"]  # the run's own name
    numbers = page[page.index("<h2>最後の検証</h2>") :].partition("</table>")[0]
    assert "損失 " in numbers and "loss" not in numbers
    words = json.loads(html.unescape(re.findall('data-words="(.*?)"', page)[0]))
    assert words["live"] == "追跡中" and words["gone"].startswith("サーバー")
    assert set(re.findall(r"words\.(\w+)", live_scripts())) == set(words)


def test_a_run_that_went_back_was_neither_killed_nor_restarted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", learning_rate=0.1)
    start = {"kind": "start", "step": 0, "devices": {"cpu": 1}}
    back = {"kind": "rollback", "step": 9, "back_to": 5, "text": "a spike"}
    records = [start, {"kind": "step", "step": 9}, {"kind": "resume", "step": 5}, back, {**start, "step": 5}]
    records += [{"kind": "finished", "step": 40}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (report,) = read_reports([run], now=NOW)
    assert [each["what"] for each in report.phases] == ["1 x cpu; went back to step 5", "1 x cpu; finished"]
    assert (report.facts["restarts"], report.facts["rollbacks"]) == ("0", "1")
    assert report.anomalies == [(9, "rollback: a spike")]


def test_a_start_of_a_finished_run_that_trains_nothing_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", learning_rate=0.1)
    again, end = {"kind": "start", "step": 40, "time": NOW + 50}, {"kind": "finished", "step": 40, "time": NOW + 51}
    for more, starts in (([again, end], 1), ([again, {"kind": "step", "step": 41, "time": NOW + 51}], 2)):
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in more)
        assert len(read_reports([run], now=NOW + 100)[0].phases) == starts


def test_the_phases_of_a_run_and_of_its_steps_are_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", learning_rate=0.1)
    assert "Phases of a step" not in render_main(read_reports([run]), created="now")
    long = {"number": 2, "name": "long rows", "first_step": 20, "steps": 20, "global_rows": 6, "sequence_length": 64}
    phases = [{**long, "number": 1, "name": "", "first_step": 0, "global_rows": 16}, long]
    ranks = [{"forward": 12.25, "backward": 30.0}, {"forward": 1234.5, "backward": 30.0}]
    profile = {"kind": "profile", "step": 4, "first": 2, "milliseconds": ranks, "slowest_rank": 1}
    with (run / "metrics.jsonl").open("a") as file:
        for record in (
            {"kind": "start", "step": 40, "phases": phases, "max_steps": 41},
            {"kind": "step", "step": 41},
            profile,
        ):
            file.write(json.dumps({**record, "time": NOW + 60}) + "\n")
    (report,) = read_reports([run], now=NOW + 100)
    assert [(each["phase"], each["from step"], each["what"]) for each in report.phases[2:]] == [
        ("phase 1", "1", "16 rows of 64 tokens a step"), ("phase 2, long rows", "21", "6 rows of 64 tokens a step"),
    ]  # fmt: skip
    assert [(each["rank"], each["steps"]) for each in report.profile] == [("0", "2 to 4"), ("1, slowest", "2 to 4")]
    page = render_main([report], created="now")
    assert "Phases of a step" in page and "<td>12.2</td>" in page and "<td>1,234.5</td>" in page


def test_a_value_of_another_type_is_never_a_traceback(tmp_path: Path) -> None:
    for changed in damaged_records.runs(tmp_path / "run"):
        try:
            render_page(read_reports([tmp_path / "run"]), created="now")
        except Exception as error:
            raise AssertionError(changed) from error


def test_a_mirrored_run_has_its_page_at_its_address(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/bucket/run"
    train(toy.parameters(store, max_steps=2), address, work_folder=tmp_path / "work")
    page = (tmp_path / "bucket/run/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "2 / 2" in page
    assert exit_code("report", address, "--out", tmp_path / "a.html") == 0
    assert "step-00000002" in (tmp_path / "a.html").read_text(encoding="utf-8")
