"""torchrun for one host, as generated scripts start it: `python -m terakoya_launch.torchrun_agent TORCHRUN_ARGUMENTS`.

The agent forwards a stop request to the training processes, so that they save and exit, kills those that still run
`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` seconds later, and exits with their exit code. Plain torchrun exits with 1 and a
traceback after a stop request, as after a crash, whatever its processes returned. It also starts processes again, as
often as `--max-restarts` says, that have failed on what a user has to mend; the agent does not.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from terakoya.distributed.signals import EXIT_CODE_FILE_VARIABLE, STOP_SIGNALS, STOPPED_EXIT_CODE
from terakoya.errors import LASTING_EXIT_CODES, RankLostError
from terakoya.process_pool import LAUNCHER_VARIABLE

STDOUT = 1
EXIT_BEFORE_START = 128 + signal.SIGTERM
"""Exit code after a stop request that came before there was anything to save."""
GRACE_SECONDS = 5.0
"""How long an agent without processes waits for other hosts after a stop request."""
FAILED_SECONDS = 20.0
"""How long processes may still run after another of this host has failed, before they are killed: they may hang."""
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's variable for how many seconds processes may take to exit after a stop request, or after one of them has
failed, before they are killed. torchrun's default is 30, ours 900."""


def run(arguments: Sequence[str]) -> int:
    """Runs torchrun with `arguments` and returns the exit code of its processes.

    Returns 0, `STOPPED_EXIT_CODE` if the processes saved after a stop request, or the exit code of the first process
    that failed: 128 plus the signal's number if a signal killed it; that of `RankLostError` if the agents of other
    hosts did not start again with this one.
    """
    note = Path(tempfile.mkdtemp()) / "ended"
    os.environ[EXIT_CODE_FILE_VARIABLE] = str(note)
    os.environ.setdefault(SHUTDOWN_TIMEOUT_VARIABLE, "900")
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    forwarder = SignalForwarder(note)
    forwarder.start()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    end_restarts_after_lasting_codes()
    try:
        torchrun.main(["--signals-to-handle", "SIGQUIT", *arguments])
        return STOPPED_EXIT_CODE if note.exists() and note.read_text() == str(STOPPED_EXIT_CODE) else 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        sys.stderr.write(f"rank {rank} exited with {code}, the first process on this host that failed\n")
        return int(code)
    except RendezvousError as error:  # the agent of another host has ended for good, or is gone
        sys.stderr.write(f"the agents of the other hosts do not start again with this one: {error}\n")
        return RankLostError.exit_code
    finally:
        forwarder.stop_listening()
        _send(signal.SIGKILL, _children())  # a process that was still starting when the stop request was forwarded
        shutil.rmtree(note.parent, ignore_errors=True)


def end_restarts_after_lasting_codes() -> None:
    """Makes torchrun's agent end, whatever is left of `--max-restarts`, after a process of this host has exited with
    one of `LASTING_EXIT_CODES`. It then closes the rendezvous, so that the agents of other hosts end, too."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.launcher import api

    class Agent(api.LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if any(failure.exitcode in LASTING_EXIT_CODES for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]


class SignalForwarder:
    """Forwards stop requests to the training processes, from a thread: the main thread may wait for other hosts in C++.

    That no process reads this one's output any more is a stop request, too: the ssh connection that started it is gone.

    Attributes:
        note: the file into which a process writes its exit code.
    """

    def __init__(self, note: Path) -> None:
        self.note = note
        self._exiting = False
        self._signal_pipe, write_end = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._signal_pipe, select.POLLIN)
        self._poll.register(STDOUT, 0)  # reports that no process reads it
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup or in a script's background
                signal.signal(number, self._in_main_thread)

    def start(self) -> None:
        """Starts the thread that forwards."""
        threading.Thread(target=self._forward, name="terakoya-signals", daemon=True).start()

    def stop_listening(self) -> None:
        """Ignores further stop requests: the exit code is known."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _in_main_thread(self, *_: object) -> None:
        if self._exiting:
            raise SystemExit(EXIT_BEFORE_START)

    def _forward(self) -> None:
        """Sends SIGTERM to all processes after each stop request, and to those that torchrun starts later in place of a
        process that died before it could handle the signal. Exits if there are no processes and none wrote the note.
        Kills processes that still run `FAILED_SECONDS` after another has failed."""
        signalled: set[int] = set()
        last_seen = deadline = 0.0  # when a process last ran, and when the signalled ones are killed
        most, whole = 0, time.monotonic()  # how many processes torchrun started, and when all of them last ran
        while True:
            if self._stop_requested(1.0 if not deadline else 0.2):
                signalled.clear()
                deadline = deadline or time.monotonic() + float(os.environ[SHUTDOWN_TIMEOUT_VARIABLE])
            running = _children()
            most = max(most, len(running)) if running else 0
            if len(running) == most or self.note.exists():
                whole = time.monotonic()
            elif time.monotonic() - whole > FAILED_SECONDS:
                _send(signal.SIGKILL, running)
            if not deadline:
                continue
            _send(signal.SIGTERM, running - signalled)
            _send(signal.SIGCONT, running - signalled)  # one that was stopped finds the others gone
            signalled |= running
            if running and time.monotonic() > deadline:
                _send(signal.SIGKILL, running)
            elif running or self.note.exists():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > GRACE_SECONDS:
                self._exit()

    def _stop_requested(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether a stop signal arrived, or the reader of the output left."""
        ready = dict(self._poll.poll(1000 * seconds))
        if ready.get(STDOUT, 0):
            self._poll.unregister(STDOUT)
        if ready.get(STDOUT, 0) & (select.POLLERR | select.POLLHUP):
            return True
        return self._signal_pipe in ready and bool(set(os.read(self._signal_pipe, 64)) & set(STOP_SIGNALS))

    def _exit(self) -> None:
        """Ends the main thread's wait or, if the main thread does not react, this process."""
        self._exiting = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.0)
        _send(signal.SIGKILL, _children())
        os._exit(EXIT_BEFORE_START)


def _children() -> set[int]:
    while True:
        with contextlib.suppress(psutil.Error):  # another process that cannot be read at the moment
            return {child.pid for child in psutil.Process().children()}
        time.sleep(0.1)


def _send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # the process has just exited
            os.kill(process, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
