"""Child processes that end when this process ends: a pool of workers, and programs."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from terakoya.errors import UserError

Submit = Callable[..., "Future[Any]"]
Key = TypeVar("Key")

ENDED_BY_AN_ERROR = frozenset({0, 1})
"""Exit codes of a worker that Python ended: 0 after an error in its first call, 1 after any other."""
LAUNCHER_VARIABLE = "TERAKOYA_LAUNCHER"
"""The variable in which a launcher gives the processes that it starts its own process id."""
SAID_VARIABLE = "TERAKOYA_SAID"
"""The variable in which a launcher names the folder where the processes that it starts note their errors."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when the thread that started it ends."""


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts `command` with the `options` of Popen; when this process dies, however it does, the child gets SIGTERM.

    Call it in the main thread: Linux sends the signal when the calling thread ends. Other systems send none.
    """
    parent = os.getpid()
    set_signal = _death_signal_setter()

    def end_with_parent() -> None:
        set_signal()
        if os.getppid() != parent:  # it died before the line above
            os._exit(128 + signal.SIGTERM)

    return subprocess.Popen(command, preexec_fn=end_with_parent, **options)


def end_with_launcher() -> bool:
    """Makes this process get SIGTERM when its launcher dies: torchrun, or one that sets `LAUNCHER_VARIABLE`.

    Without such a launcher nothing happens. Returns False if the launcher is dead already.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    parent = os.getppid()
    _death_signal_setter()()
    return os.getppid() == parent and (launcher is None or int(launcher) == parent or is_alive(int(launcher)))


def is_said_already(error: str) -> bool:
    """Returns whether another process of the launcher that started this one has said `error`, which all of them met; if
    not, notes that this one says it."""
    folder = os.environ.get(SAID_VARIABLE)
    if folder is None or os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid()):  # a child of such a process speaks
        return False
    try:
        Path(folder, hashlib.sha256(error.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # said twice is better than not at all
        return False
    return False


def is_alive(process: int) -> bool:
    """Returns whether a process with this id runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _death_signal_setter() -> Callable[[], None]:
    """Returns a function that makes the calling process get SIGTERM when its parent dies."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`. Without effect outside the main thread, and for as long as a
    library computes without returning to Python."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def warm_up(modules: Sequence[str] = ()) -> None:
    """Starts the server process from which workers are forked. It imports `modules` and the modules of terakoya that
    this process has loaded, while this process continues with its own start. Without this call `workers` does the same,
    but later."""
    context = _context()
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    loaded = [name for name in sys.modules if name.partition(".")[0] == "terakoya"]
    context.set_forkserver_preload([*loaded, *modules])
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for this process, also while the server imports
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _kill_server() -> None:
    """Ends the server, which would else start workers that were asked for, after this process has ended."""
    from multiprocessing import forkserver

    if (server := getattr(forkserver._forkserver, "_forkserver_pid", None)) is not None:
        os.kill(server, signal.SIGKILL)


@contextmanager
def workers(
    processes: int, start: Callable[..., None], arguments: Sequence[Any], *, task: str, remedy: str = ""
) -> Iterator[Submit]:
    """Starts `processes` worker processes, each of which first calls `start(*arguments)`. Yields a function that
    submits a call to one of them and returns its Future. The workers end when the block ends with an error, and when
    this process dies. Raises UserError if a worker died. The message names the `task` and ends with the sentence
    `remedy`."""
    context = _context()
    warm_up([start.__module__])
    worker_end, parent_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _start, (worker_end, dict(os.environ), start, tuple(arguments)))
    try:
        yield pool.submit
    except BrokenProcessPool as error:
        raise UserError(f"{task}: {_explain_death(pool, processes)} {remedy}".rstrip()) from error
    except BaseException as error:
        parent_end.close()  # the workers exit at once
        if isinstance(error, KeyboardInterrupt):
            _kill_server()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        parent_end.close()
        worker_end.close()


def in_order(
    calls: Iterable[tuple[Key, tuple[Any, ...]]], processes: int, make: Callable[..., Callable[..., Any]],
    arguments: Sequence[Any] = (), *, task: str, remedy: str = "",
) -> Iterator[tuple[Key, Any]]:  # fmt: skip
    """Calls the function that `make(*arguments)` returns once for each of `calls`, a key and the arguments: in this
    process if `processes` is 1, else in as many workers, each of which makes its own. Yields each key with its result,
    in the order of `calls`, of which a few are in memory at a time. Raises UserError as `workers`."""
    if processes == 1:
        function = make(*arguments)
        for key, given in calls:
            yield key, function(*given)
        return
    warm_up([make.__module__])
    waiting: deque[tuple[Key, Future[Any]]] = deque()
    with workers(processes, _make, (make, arguments), task=task, remedy=remedy) as submit:
        for key, given in calls:
            waiting.append((key, submit(_call, *given)))
            if len(waiting) > 2 * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


_made: Callable[..., Any] | None = None


def _make(make: Callable[..., Callable[..., Any]], arguments: Sequence[Any]) -> None:
    global _made
    _made = make(*arguments)


def _call(*given: Any) -> Any:
    assert _made is not None, "worker was not started"
    return _made(*given)


def _explain_death(pool: ProcessPoolExecutor, processes: int) -> str:
    """Returns how a worker of the broken `pool` died, and what to do. The pool ends its other workers with SIGTERM."""
    started = list((pool._processes or {}).values())
    pool.shutdown()  # its thread reads the exit codes, too: of two that read one at a time, one gets 255
    codes = {process.exitcode for process in started}
    if codes & ENDED_BY_AN_ERROR and -signal.SIGKILL not in codes:
        return (
            "a worker process ended with an error, which is printed above. A script that calls terakoya does so below "
            '`if __name__ == "__main__":`, as workers import it.'
        )
    return f"a worker process died, most likely killed because memory ran out; use fewer than --processes {processes}."


def _context() -> Any:
    """Returns the multiprocessing context. Where the system supports it, workers are forked from a server process that
    has imported everything, which is fast. They are never forked from this process: its threads and locks would be
    copied in an arbitrary state."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _start(
    parent: Connection, environment: dict[str, str], start: Callable[..., None], arguments: Sequence[Any]
) -> None:
    """Makes this process a worker, which exits at once when the other end of `parent` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    os.environ.clear()  # the server has the environment of its own start
    os.environ.update(environment)
    start(*arguments)


def _exit_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def available_cores() -> int:
    """Returns the number of processors that this process may use, of those that its container leaves it."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return processors if quota is None else min(processors, max(1, int(quota)))


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns how many processors' time the control groups of this process leave it, None for any. Version 2 has
    `cpu.max`, version 1 `cpu.cfs_quota_us`; `own` names this process's groups, which a container may not see."""
    folders = {cgroups, cgroups / "cpu"}
    for line in lines_of(own):
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "cpu") or "cpu" in controllers.split(","):
            root = cgroups / "cpu" if controllers else cgroups
            inner = root / group.lstrip("/")
            folders.update(folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))
    limits = []
    for folder in folders:
        two = [*lines_of(folder / "cpu.max"), "max"][0].split()
        one = [*lines_of(folder / "cpu.cfs_quota_us"), *lines_of(folder / "cpu.cfs_period_us")]
        for quota, period in (each for each in (two, one) if len(each) == 2):
            if quota.isdigit() and int(period):  # without a limit: max, and -1
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def lines_of(file: Path) -> list[str]:
    """Returns the lines of a file of the kernel; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
