"""The report in a real browser: a part of a chart is drawn large, losses are smoothed, runs are hidden, and a page
follows its runs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_browser import needs_browser
from test_run_report import NOW, make_run
from tool_modules import load_tool

from terakoya_report.live import LivePage, create_server
from terakoya_report.page import live_scripts, render_main, render_page
from terakoya_report.report import read_reports

pytestmark = needs_browser
LOSS = 'svg[aria-label="loss (nats)"]'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with load_tool("browser").Browser(width=1280, height=900) as opened:
        yield opened


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "one", learning_rate=0.1, restart=21), make_run(tmp_path / "two", learning_rate=0.2)]


def curve(browser: Any, number: int = 1) -> list[list[float]]:
    points = browser.run(f"document.querySelectorAll('{LOSS} .curve polyline')[{number}].getAttribute('points')")
    return [[float(part) for part in each.split(",")] for each in points.split()]


def labels(browser: Any) -> list[str]:
    texts = browser.run(f"[...document.querySelectorAll('{LOSS} .ticks text')].map(each => each.textContent)")
    return [str(text) for text in texts]


def rates(browser: Any) -> str:
    return str(browser.run("document.querySelector('svg[aria-label=\"samples a second\"] .drawn').innerHTML"))


def smooth(browser: Any, weight: float) -> None:
    browser.run(f"smoothing.value = {weight}; smoothing.dispatchEvent(new Event('input')); 0")


def test_a_part_of_a_chart_is_drawn_large(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(read_reports(runs, now=NOW), created="now"))
    browser.open(page)
    whole, ticks = curve(browser), labels(browser)
    left, top, width, height = browser.box(LOSS)
    browser.drag((left + 0.5 * width, top + 0.5 * height), (left + 0.75 * width, top + 0.5 * height))
    zoomed = curve(browser)
    assert len(zoomed) == len(whole) == 40
    steps = [step for step in range(1, 41) if 62 <= zoomed[step - 1][0] <= 628]
    assert steps == list(range(19, 30)), "the steps between half and three quarters of the chart"
    heights = [zoomed[step - 1][1] for step in steps]
    assert min(heights) >= 10 and max(heights) <= 226 and max(heights) - min(heights) > 180, "they fill its height"
    assert labels(browser) != ticks and {"20", "22"} <= set(labels(browser))
    browser.mouse("moved", left + 0.5 * width, top + 0.5 * height)
    shown = browser.run(f"document.querySelector('{LOSS} .pointer').textContent")
    assert any(f"one: training {9 - step / 10:.5g} at {step}" in shown for step in (23, 24, 25)), shown
    browser.click(left + 0.5 * width, top + 0.5 * height, times=2)
    assert curve(browser) == whole and labels(browser) == ticks
    assert browser.errors == []


def test_losses_are_smoothed(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(read_reports(runs, now=NOW), created="now"))
    browser.open(page)
    browser.errors.clear()
    whole, validation, ticks, others = curve(browser), curve(browser, 0), labels(browser), rates(browser)
    measured = [9 - step / 10 for step in range(1, 41)]
    slope = (whole[-1][1] - whole[0][1]) / (measured[-1] - measured[0])
    smooth(browser, 0.8)
    means = []
    for last in range(1, 41):
        weights = [0.8 ** (last - step) for step in range(1, last + 1)]
        means.append(sum(map(float.__mul__, weights, measured)) / sum(weights))
    drawn = curve(browser, 2)
    assert [y for _, y in drawn] == pytest.approx([whole[0][1] + slope * (mean - 8.9) for mean in means], abs=0.2)
    assert max(abs(y - before) for (_, y), (_, before) in zip(drawn, whole, strict=True)) > 10, "far from what it was"
    behind = curve(browser, 1)
    assert [y for _, y in behind] == pytest.approx([y for _, y in whole], abs=0.2), "what was measured, behind it"
    assert [y for _, y in curve(browser, 0)] == pytest.approx([y for _, y in validation], abs=0.2)
    assert rates(browser) == others, "other charts stay"
    left, top, width, height = browser.box(LOSS)
    browser.mouse("moved", left + 0.5 * width, top + 0.5 * height)
    assert ", smoothed 7." in browser.run(f"document.querySelector('{LOSS} .pointer').textContent")
    smooth(browser, 0)
    assert curve(browser) == whole and labels(browser) == ticks and browser.errors == []


def test_losses_are_drawn_over_a_logarithmic_axis(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(read_reports(runs, now=NOW), created="now"))
    browser.open(page)
    whole, ticks, others = curve(browser), labels(browser), rates(browser)
    left, top, width, height = browser.box("#logarithmic")
    browser.click(left + width / 2, top + height / 2)
    heights = [y for _, y in curve(browser)]
    logs = [math.log(9 - step / 10) for step in range(1, 41)]
    slope = (heights[-1] - heights[0]) / (logs[-1] - logs[0])
    assert slope < 0 and heights == pytest.approx([heights[0] + slope * (log - logs[0]) for log in logs], abs=0.2)
    places = f"[...document.querySelectorAll('{LOSS} .ticks text[text-anchor=end]')]"
    marks = browser.run(f"{places}.map(each => [Number(each.textContent), Number(each.getAttribute('y')) - 4])")
    marks = [(value, y) for value, y in marks if y <= 226]
    assert len(marks) >= 3 and [y for _, y in marks] == pytest.approx(
        [heights[0] + slope * (math.log(value) - logs[0]) for value, _ in marks], abs=0.5
    ), "the marks of the axis, too"
    assert rates(browser) == others, "other charts stay"
    left, top, width, height = browser.box("#logarithmic")
    browser.click(left + width / 2, top + height / 2)
    assert curve(browser) == whole and labels(browser) == ticks


def test_marks_of_a_logarithmic_axis(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(read_reports(runs[:1], now=NOW), created="now"))
    browser.open(page)
    assert browser.run("logTicks(0.9, 60)") == [1, 2, 5, 10, 20, 50]
    assert browser.run("logTicks(0.5, 20000)") == [1, 10, 100, 1000, 10000]
    assert browser.run("logTicks(3.1, 6.2)") == [4, 5, 6]


def test_a_run_is_hidden(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(read_reports(runs, now=NOW), created="now"))
    browser.open(page)

    def shown() -> list[str]:
        each = f"[...document.querySelectorAll('{LOSS} .curve')].map(each => getComputedStyle(each).display)"
        return [str(display) for display in browser.run(each)]

    assert set(shown()) == {"inline"} and len(shown()) == 4, "training and validation of two runs"
    left, top, width, height = browser.box("#run1")
    browser.click(left + width / 2, top + height / 2)
    assert shown() == ["inline", "inline", "none", "none"]
    left, top, width, height = browser.box(LOSS)
    browser.mouse("moved", left + 0.5 * width, top + 0.5 * height)
    words = browser.run(f"document.querySelector('{LOSS} .pointer').textContent")
    assert "one: training" in words and "two" not in words


def test_a_live_page_follows_and_keeps_what_was_chosen(browser: Any, runs: list[Path]) -> None:
    page = LivePage(
        lambda: render_page(read_reports(runs, now=NOW), created="now", live_every=0.2),
        lambda: render_main(read_reports(runs, now=NOW), created="now"),
        every=0.0,
    )
    server = create_server(page, port=0, scripts=live_scripts())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser.errors.clear()
    browser.open(f"http://127.0.0.1:{server.server_port}/")
    browser.wait_for("seen")
    left, top, width, height = browser.box("#run1")
    browser.click(left + width / 2, top + height / 2)
    left, top, width, height = browser.box(LOSS)
    browser.drag((left + 0.5 * width, top + 0.5 * height), (left + 0.75 * width, top + 0.5 * height))
    smooth(browser, 0.5)
    first = labels(browser)
    browser.mouse("moved", left + 0.5 * width, top + 0.5 * height)
    record = {"kind": "step", "step": 50, "tokens": 180_000, "loss": 3.25, "mlm_loss": 3.25, "time": NOW + 50}
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    last = f"JSON.parse(document.querySelector('{LOSS}').dataset.lines)[1].value.at(-1)"
    browser.wait_for(f"{last} === '3.25'", timeout=20)
    assert labels(browser) == first, "the part that was chosen, by its values"
    assert browser.run("document.getElementById('run1').checked") is False
    pointed = browser.run(f"document.querySelector('{LOSS} .pointer').textContent")
    assert "one: training" in pointed, "the values under a pointer that rests"
    behind = browser.run(f"document.querySelectorAll('{LOSS} .measured').length")
    assert browser.run("smoothing.value") == "0.5" and behind == 2, "smoothed as before"
    assert browser.run("document.getElementById('live').textContent") == "live"
    (runs[0] / "metrics.jsonl").rename(runs[0] / "moved")
    (runs[0] / "parameters.json").unlink()
    browser.wait_for("document.getElementById('live').textContent.includes('no such file')")
    (runs[0] / "moved").rename(runs[0] / "metrics.jsonl")
    browser.wait_for("document.getElementById('live').textContent === 'live'")
    server.shutdown()
    server.server_close()
    browser.wait_for("document.getElementById('live').textContent.includes('gone')")
    lost = ("ERR_CONNECTION", "ERR_SOCKET_NOT_CONNECTED", "503")  # requests for the run, or to the server, that is gone
    others = [error for error in browser.errors if not any(each in error for each in lost)]
    assert others == [], "the page's policy fits it"
