"""Alerts: who gets which message, and that neither a secret nor a dead server gets into the way of a run."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy

from terakoya import plugins
from terakoya.components import EventListener
from terakoya.components.run import StepAnomaly
from terakoya.config.parameters import Parameters
from terakoya.errors import RollingBack, UserError


class Hook(http.server.BaseHTTPRequestHandler):
    """A webhook that keeps what it is sent."""

    received: list[tuple[str, dict[str, Any]]]
    answer = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).received.append((self.path, body))
        self.send_response(self.answer)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hook]]:
    handler = type("Kept", (Hook,), {"received": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{server.server_port}/services/T0/B0/verysecret")
        yield handler
        server.shutdown()


def make_run(**changes: Any) -> Any:
    run = SimpleNamespace(
        rank=0, step=40, consumed_tokens=0, folder=Path("work/my-bert"), ended_by=None, warnings=[],
        length=SimpleNamespace(is_reached=lambda step, tokens: step >= 40), **changes,
    )  # fmt: skip
    run.warn = run.warnings.append
    return run


def start(run: Any, **settings: Any) -> EventListener:
    plugin = plugins.registry().component("events", "alerts")(**{"webhook_variable": "MY_HOOK", **settings})
    listener: EventListener = plugin.start(run)
    listener.run_started(run)
    return listener


def report(*anomalies: StepAnomaly) -> Any:
    return SimpleNamespace(anomalies=anomalies)


def test_end_and_spike_are_told(webhook: type[Hook]) -> None:
    run = make_run()
    listener = start(run)
    listener.step_finished(run, report())
    for step in (12, 13):
        listener.step_finished(run, report(StepAnomaly(step, "spike", "the loss 9 is a spike")))
    listener.run_finished(run, None)
    texts = [body["text"] for _, body in webhook.received]
    assert len(texts) == 2 and not run.warnings, "the second spike is within the quiet time"
    assert "my-bert on " in texts[0] and texts[0].endswith("step 40: spike: step 12: the loss 9 is a spike")
    assert texts[1].endswith("finished: all 40 steps are done")
    assert webhook.received[0][0] == "/services/T0/B0/verysecret"


@pytest.mark.parametrize("form", ["discord", "json"])
def test_a_failure_is_told_without_its_secrets(form: str, webhook: type[Hook]) -> None:
    run = make_run()
    start(run, webhook_format=form).run_finished(run, RuntimeError("no https://me:hunter2@host/x"))
    ((_, body),) = webhook.received
    text = body["content" if form == "discord" else "text"]
    assert "RuntimeError: no https://***@host/x" in text
    assert form == "discord" or (body["kind"], body["run"], body["step"]) == ("failed", "my-bert", 40)


def test_a_run_that_goes_back_has_not_failed(webhook: type[Hook]) -> None:
    run = make_run()
    start(run).run_finished(run, RollingBack("the loss was 9: the run goes back"))
    ((_, body),) = webhook.received
    assert body["text"].endswith("spike: the loss was 9: the run goes back")
    start(run, on=("failed", "finished")).run_finished(run, RollingBack("x"))
    assert len(webhook.received) == 1


def test_what_is_not_wanted_is_not_sent_and_other_ranks_send_nothing(webhook: type[Hook]) -> None:
    run, other = make_run(), make_run()
    start(run, on=("spike",)).run_finished(run, None)
    other.rank = 1
    start(other).run_finished(other, ValueError("x"))
    assert webhook.received == []


def test_a_stall_is_told_once(webhook: type[Hook]) -> None:
    run = make_run()
    listener = start(run, stall_minutes=0.1 / 60, on=("stall",))
    deadline = time.monotonic() + 10
    while not webhook.received and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    listener.run_finished(run, None)
    ((_, body),) = webhook.received
    assert "stall: no step has ended for" in body["text"]


def test_a_server_that_refuses_or_is_gone_is_one_warning_without_the_address(
    webhook: type[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook.answer = 500
    run = make_run()
    start(run).run_finished(run, None)
    assert len(run.warnings) == 1 and "HTTP Error 500" in run.warnings[0]
    monkeypatch.setenv("MY_HOOK", "ftp://host/verysecret")
    gone = make_run()
    start(gone).run_finished(gone, None)
    assert "MY_HOOK: expected an address that begins with https://" in gone.warnings[0]
    assert "verysecret" not in "".join([*run.warnings, *gone.warnings])


class Smtp(socketserver.StreamRequestHandler):
    """An SMTP server that keeps one message."""

    lines: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        data = False
        while line := self.rfile.readline():
            text = line.decode().rstrip("\r\n")
            type(self).lines.append(text)
            if data and text != ".":
                continue
            data = text.upper() == "DATA"
            self.wfile.write(b"354 go\r\n" if data else b"221 bye\r\n" if text.upper() == "QUIT" else b"250 ok\r\n")


def test_email(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = type("Kept", (Smtp,), {"lines": []})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = make_run()
        email = {"to": ["a@example.org"], "host": "127.0.0.1", "port": server.server_address[1]}
        start(run, webhook_variable=None, email=email).run_finished(run, None)
        server.shutdown()
    assert "Subject: terakoya: my-bert finished" in handler.lines and "To: a@example.org" in handler.lines
    assert "text: all 40 steps are done" in handler.lines and not run.warnings


def test_settings_that_reach_nobody_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_HOOK", raising=False)
    with pytest.raises(UserError, match="the environment variable MY_HOOK is not set"):
        start(make_run())
    for settings, message in (
        ({}, r'events.alerts.webhook_variable: expected the name of an environment variable, or an "email"'),
        ({"email": {"to": ["a@b"], "user": "me"}}, r"events.alerts.email.starttls: expected true"),
        ({"webhook_variable": "X", "on": ["end"]}, r"events.alerts.on.0: "),
    ):
        with pytest.raises(UserError, match=message):
            raw = {**toy.parameters(Path("store")), "events": {"alerts": settings}}
            Parameters.from_dict(raw, source="a.json")
