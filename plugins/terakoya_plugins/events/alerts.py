"""Tells somebody when a run ends, fails, spikes or stalls: by a webhook (Slack, Discord, or plain JSON) or by e-mail.

Addresses with a secret and passwords come from environment variables, never from parameters. Messages are sent by a
thread of rank 0: what is slow or fails costs the run nothing, and each failure is one warning without secrets.
"""

from __future__ import annotations

import json
import os
import queue
import smtplib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run, StepReport
from terakoya.errors import RollingBack, UserError, describe_error
from terakoya.log import hide_secrets

Kind = Literal["finished", "failed", "spike", "stall"]
SEND_SECONDS = 10.0
"""How long one message may take, and how long the end of a run waits for the last ones."""


class Email(BaseModel):
    """Where e-mail goes, and through which server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: tuple[str, ...] = Field(min_length=1)
    """Addresses."""
    sender: str = "terakoya@localhost"
    """The address in the From line."""
    host: str = "localhost"
    """The SMTP server."""
    port: PositiveInt = 25
    """The port of the SMTP server."""
    starttls: bool = False
    """Whether to encrypt the connection; a password is sent over an encrypted one only."""
    user: str | None = None
    """The user's name at the server; null does not log in."""
    password_variable: str = "TERAKOYA_SMTP_PASSWORD"
    """The environment variable with the password."""


class Alerts(EventPlugin):
    """Sends a message when the run ends, fails, spikes or stalls."""

    on: tuple[Kind, ...] = ("finished", "failed", "spike", "stall")
    """What is worth a message."""
    webhook_variable: str | None = None
    """The environment variable with the webhook's address, such as `SLACK_WEBHOOK`: the address is a secret."""
    webhook_format: Literal["slack", "discord", "json"] = "slack"
    """What is posted: `{"text": ...}`, `{"content": ...}`, or all facts as JSON."""
    email: Email | None = None
    """E-mail as well as a webhook, or instead of one."""
    stall_minutes: PositiveFloat = 30.0
    """A run stalls if no step ends for so long; validations and saves count as part of a step. Unit: minutes."""
    quiet_minutes: PositiveFloat = 10.0
    """Spikes within this time after a message about one send none. Unit: minutes."""

    test_settings: ClassVar[Mapping[str, Any]] = {"webhook_variable": "TERAKOYA_TEST_WEBHOOK"}

    def check(self, parameters: Any) -> None:
        """Raises UserError where there is nowhere to send a message to, or a password would go in the clear."""
        if self.webhook_variable is None and self.email is None:
            raise UserError('webhook_variable: expected the name of an environment variable, or an "email"')
        if self.email is not None and self.email.user is not None and not self.email.starttls:
            raise UserError(
                "email.starttls: expected true where email.user logs in: the password would go in the clear"
            )

    def start(self, run: Run) -> EventListener:
        if run.rank == 0:
            if self.webhook_variable is not None:
                _variable("webhook_variable", self.webhook_variable)
            if self.email is not None and self.email.user is not None:
                _variable("email.password_variable", self.email.password_variable)
        return _Listener(self)


def _variable(setting: str, name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise UserError(f"events.alerts.{setting}: the environment variable {name} is not set; export it")
    return value


class _Listener(EventListener):
    """`last_step` is when the last step ended, None while no stall can be."""

    def __init__(self, settings: Alerts) -> None:
        self.settings = settings
        self.sender: _Sender | None = None
        self.last_step: float | None = None
        self.told_stall = False
        self.quiet_until = 0.0
        self.over = threading.Event()

    def run_started(self, run: Run) -> None:
        if run.rank != 0:
            return
        self.sender = _Sender(self.settings, run.warn)
        self.last_step = time.monotonic()
        if "stall" in self.settings.on:
            threading.Thread(target=self._watch, args=(run,), name="alerts stall", daemon=True).start()

    def step_finished(self, run: Run, report: StepReport) -> None:
        if self.sender is None:
            return
        now = time.monotonic()
        self.last_step, self.told_stall = now, False
        spikes = [each for each in report.anomalies if each.kind == "spike"]
        if spikes and "spike" in self.settings.on and now >= self.quiet_until:
            self.quiet_until = now + 60 * self.settings.quiet_minutes
            self._send(run, "spike", f"step {spikes[0].step:,}: {spikes[0].text}")

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        self.over.set()
        if self.sender is None:
            return
        if isinstance(error, RollingBack):
            if "spike" in self.settings.on:
                self._send(run, "spike", str(error))
        elif error is not None and "failed" in self.settings.on:
            self._send(run, "failed", describe_error(error))
        elif error is None and "finished" in self.settings.on:
            done = run.length.is_reached(step=run.step, tokens=run.consumed_tokens)
            text = f"all {run.step:,} steps are done" if done else "stopped; it continues when it is started again"
            self._send(run, "finished", run.ended_by or text)
        self.sender.close()

    def _watch(self, run: Run) -> None:
        """Runs in a thread: tells once that no step ends."""
        limit = 60 * self.settings.stall_minutes
        while not self.over.wait(min(limit / 4, 15.0)):
            if self.last_step is not None and not self.told_stall and time.monotonic() - self.last_step > limit:
                self.told_stall = True
                self._send(run, "stall", f"no step has ended for {self.settings.stall_minutes:g} minutes")

    def _send(self, run: Run, kind: Kind, text: str) -> None:
        assert self.sender is not None
        self.sender.put(
            {
                "kind": kind,
                "run": run.folder.resolve().name,
                "folder": str(run.folder.resolve()),
                "host": socket.gethostname(),
                "step": run.step,
                "text": hide_secrets(text),
            }
        )


class _Sender:
    """Sends messages from a thread; what fails is reported once by `warn`."""

    def __init__(self, settings: Alerts, warn: Callable[[str], None]) -> None:
        self.settings = settings
        self.warn = warn
        self.queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(100)
        self.thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self.thread.start()

    def put(self, facts: Mapping[str, Any]) -> None:
        """Queues a message; never waits."""
        if not self.queue.full():
            self.queue.put_nowait(facts)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(SEND_SECONDS)

    def _run(self) -> None:
        while (facts := self.queue.get()) is not None:
            for send in (self._post, self._mail):
                try:
                    send(facts)
                except (OSError, ValueError, smtplib.SMTPException) as error:
                    # urllib and smtplib may quote the address or the answer of the server
                    mail = self.settings.email
                    names = (self.settings.webhook_variable, mail.password_variable if mail else None)
                    secrets = [os.environ.get(name, "") for name in names if name]
                    text = hide_secrets(f"{type(error).__name__}: {error}")
                    for secret in filter(None, secrets):
                        text = text.replace(secret, "***")
                    self.warn(f"alerts: the message about {facts['kind']} was not sent: {text}")

    def _post(self, facts: Mapping[str, Any]) -> None:
        if self.settings.webhook_variable is None:
            return
        address = _variable("webhook_variable", self.settings.webhook_variable)
        if not address.startswith(("https://", "http://")):
            raise ValueError(f"{self.settings.webhook_variable}: expected an address that begins with https://")
        line = f"{facts['run']} on {facts['host']}, step {facts['step']:,}: {facts['kind']}: {facts['text']}"
        body = {"slack": {"text": line}, "discord": {"content": line[:2000]}, "json": dict(facts)}
        data = json.dumps(body[self.settings.webhook_format], ensure_ascii=False).encode()
        request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SEND_SECONDS):
            pass

    def _mail(self, facts: Mapping[str, Any]) -> None:
        mail = self.settings.email
        if mail is None:
            return
        message = EmailMessage()
        message["Subject"] = f"terakoya: {facts['run']} {facts['kind']}"
        message["From"], message["To"] = mail.sender, ", ".join(mail.to)
        message.set_content("\n".join(f"{name}: {value}" for name, value in facts.items()))
        with smtplib.SMTP(mail.host, mail.port, timeout=SEND_SECONDS) as server:
            if mail.starttls:
                server.starttls()
            if mail.user is not None:
                server.login(mail.user, _variable("email.password_variable", mail.password_variable))
            server.send_message(message)


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"alerts": Alerts}
