"""What a signal does to a run: a request, an end without another save, an end during start-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from terakoya.distributed import signals
from terakoya.distributed.signals import Outlook, StopRequest


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a stop request says; the second Ctrl-C of these tests comes at once."""
    monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", 0.0)
    yield []


def listening(said: list[str], outlook: Outlook) -> StopRequest:
    stop = StopRequest()
    stop.outlook, stop.say = lambda: outlook, said.append
    stop.listen()
    return stop


def send(number: signal.Signals, said: list[str], lines: int) -> None:
    """Sends this process a signal and waits until `lines` were said in all."""
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 10
    while len(said) < lines:
        assert time.monotonic() < deadline, said
        time.sleep(0.005)


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_the_first_signal_is_a_request_and_says_so(number: signal.Signals, said: list[str]) -> None:
    before = signal.getsignal(number)
    with listening(said, Outlook(11.7, None, 3, 4000)) as stop:
        send(number, said, 1)
        assert stop.signal == number.name
    again = "; again to leave without saving" if number == signal.SIGINT else ""
    assert said == [f"{number.name}: saving after this step (about 12 s){again}"]
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_leaves_at_once_and_says_what_is_lost(said: list[str]) -> None:
    with listening(said, Outlook(None, None, 37, 4000)):
        send(signal.SIGINT, said, 1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT, said, 99)
    assert said[1] == (
        "left without saving: 37 steps since the checkpoint of step 4,000 lost; the same command continues from there"
    )


def test_a_second_ctrl_c_waits_for_a_save_under_way(said: list[str]) -> None:
    with listening(said, Outlook(1.0, 4100, 0, 4000)) as stop:
        send(signal.SIGINT, said, 1)
        send(signal.SIGINT, said, 2)
        assert stop.signal == "SIGINT"
    assert said == [
        "SIGINT: step 4,100 is being saved, then the run stops; again to leave without saving",
        "SIGINT: step 4,100 is being saved; the run leaves once that is complete",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_schedulers_may_send_a_signal_twice(number: signal.Signals, said: list[str]) -> None:
    with listening(said, Outlook(1.0, None, 1, None)):
        send(number, said, 1)
        os.kill(os.getpid(), number)
        time.sleep(0.05)
    assert len(said) == 1


def test_one_ctrl_c_that_arrives_twice_is_one(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal delivers it, and so does a launcher."""
    monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", 1.0)
    with listening(said, Outlook(1.0, None, 1, None)):
        send(signal.SIGINT, said, 1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    assert len(said) == 1


def test_what_a_run_without_a_checkpoint_loses() -> None:
    assert Outlook(None, None, 1, None).after_leaving() == (
        "left without saving: 1 step lost, there is no checkpoint yet; the same command begins again"
    )


STARTING = """
import time
from terakoya.distributed.signals import StopRequest
StopRequest().leave_during_start()
print("up", flush=True)
while True:
    time.sleep(100)  # as a main thread in C++ would, it does not look at signals
"""


ENDING = """
import sys, time
from terakoya.distributed.signals import StopRequest
stop = StopRequest()
stop.leave_during_start()
stop.listen()
stop.leave_after_the_end(lambda name: sys.stderr.write(f"{name}: all is saved"))
print("up", flush=True)
while True:
    time.sleep(100)
"""


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_a_signal_after_the_last_save_ends_at_once_with_75(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (75, f"{number.name}: all is saved")


def test_after_the_last_save_signals_of_a_program_of_ones_own_are_what_they_were(said: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening(said, Outlook(None, None, 0, 12)) as stop:
        stop.leave_after_the_end(said.append)
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGTERM, ""), (signal.SIGHUP, ""), (signal.SIGHUP, "nohup")])
def test_a_signal_during_start_up_ends_at_once_with_75(number: signal.Signals, ignored: str) -> None:
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(
        [*filter(None, [ignored]), *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(number)
        if ignored:  # the terminal may close
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "during start-up: nothing is lost, and the same command continues\n" in error


def test_signals_that_are_ignored_by_now_stay_so(said: list[str]) -> None:
    """A process that has saved and is about to exit."""
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    try:
        with listening(said, Outlook(1.0, None, 1, None)):
            signals.ignore_stop_signals()
        assert {signal.getsignal(number) for number in signals.STOP_SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_thread_has_ended_when_listening_has(said: list[str]) -> None:
    """A thread that is still inside torch while Python ends aborts the process, whose exit code then says: crashed."""

    def say_slowly(text: str) -> None:
        time.sleep(0.3)
        said.append(text)

    stop = StopRequest()
    stop.outlook, stop.say = lambda: Outlook(None, None, 1, None), say_slowly
    stop.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    while stop.signal is None:
        time.sleep(0.005)
    stop.close()
    assert said and stop.outlook is None
    assert "signals" not in {thread.name for thread in threading.enumerate()}
