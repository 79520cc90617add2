"""The live report over HTTP: it follows a run, answers this machine's browser alone, and escapes everything."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_run_report import NOW, Reader, make_run

from terakoya_report.live import LivePage, create_server
from terakoya_report.page import live_scripts, render_main, render_page
from terakoya_report.report import read_reports

Answer = tuple[int, http.client.HTTPMessage, str]


class Served:
    """A server of one run, and what its browser asks."""

    def __init__(self, run: Path) -> None:
        self.run = run
        page = LivePage(
            lambda: render_page(read_reports([run], now=NOW), created="now", live_every=0.5),
            lambda: render_main(read_reports([run], now=NOW), created="now"),
            every=0.0,
        )
        self.server = create_server(page, port=0, scripts=live_scripts())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    page = Served(make_run(tmp_path / "<img src=x onerror=alert(1)>", learning_rate=0.1))
    yield page
    page.server.shutdown()
    page.server.server_close()


def test_the_page_follows_the_run(served: Served) -> None:
    status, headers, page = served.get("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert Reader(page).open == [] and 'data-every="0.5"' in page and "loss (nats)" in page
    status, headers, before = served.get("/body")
    assert status == 200 and before in page, "the part that changes is what the page begins with"
    tag = headers["ETag"]
    assert served.get("/body", If_None_Match=tag)[0] == 304
    record: dict[str, Any] = {"kind": "step", "step": 41, "tokens": 147_600, "loss": 1.2345, "time": NOW + 50}
    with (served.run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    status, headers, after = served.get("/body", If_None_Match=tag)
    assert status == 200 and headers["ETag"] != tag and "1.2345" in after and "1.2345" not in before


def test_it_answers_a_browser_on_this_machine_alone(served: Served) -> None:
    assert served.server.server_address[0] == "127.0.0.1"
    port = served.server.server_port
    assert served.get("/", Host=f"localhost:{port}")[0] == 200
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example"):
        status, _, text = served.get("/", Host=host)
        assert status == 403 and "loss" not in text
    for path in ("/metrics.jsonl", "/../parameters.json", "/body/x", "/%2e%2e/"):
        assert served.get(path)[0] == 404
    assert served.get("/", method="POST")[0] == 501


def test_names_are_escaped_and_no_other_script_may_run(served: Served) -> None:
    _, headers, page = served.get("/")
    assert "<img" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page and page.count("<script>") == 1
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and headers["X-Content-Type-Options"]
    assert live_scripts() in page, "its hash is the one that the policy allows"


def test_a_run_that_is_moved_away_is_said(served: Served) -> None:
    served.run.rename(served.run.with_name("elsewhere"))
    status, _, text = served.get("/body")
    assert status == 503 and "no such file" in text
