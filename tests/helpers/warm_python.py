"""A stand-in for `python` whose `-m MODULE`, `-c CODE` and `SCRIPT.py` need no seconds for imports.

A start of `terakoya train` in a new interpreter imports for several seconds of CPU time. The stand-in asks a server
that has imported `warm` for a forked process with its own arguments, environment, folder, standard streams and ignored
signals. It forwards stop signals to that process and ends as it ends; where it is killed, the process is killed too.
Whatever else is called runs in the real interpreter.

The process is no child of what started it: tests of that use `sys.executable`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fork_server

PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, sys

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
arguments = [each for each in sys.argv[1:] if each != "-u"]
if arguments[:1] not in (["-m"], ["-c"]) and not arguments[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

early, process = [], None

def forward(number, frame):
    if process is None:
        early.append(number)
        return
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass

ignored = [each for each in STOPS if signal.getsignal(each) == signal.SIG_IGN]
for each in STOPS:
    if each not in ignored:
        signal.signal(each, forward)
request = json.dumps({{
    "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "ignored": ignored,
    "executable": sys.argv[0],
}})
server = socket.socket(socket.AF_UNIX)
server.connect({folder!r} + "/" + os.uname().nodename)
socket.send_fds(server, [b"f"], [0, 1, 2])
server.sendall(request.encode() + b"\\n")
answers = server.makefile()
process = int(answers.readline())
for number in early:
    forward(number, None)
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_program(folder: Path) -> Path:
    """Writes the stand-in into `folder`, where it finds the server of its host."""
    program = folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    return program


@contextlib.contextmanager
def running() -> Iterator[Path]:
    """Runs a server for as long as the block takes; yields the stand-in."""
    import toy

    with tempfile.TemporaryDirectory() as folder:  # not pytest's: the path of a socket has at most 107 characters
        server = toy.fork(serve, Path(folder), fork_server.address())
        try:
            wait_for_server(Path(folder), os.uname().nodename)
            yield write_program(Path(folder))
        finally:
            server.terminate()
            server.join(30)


@contextlib.contextmanager
def running_on(hosts: Mapping[str, int]) -> Iterator[Path]:
    """The same for this host and for `hosts`, in whose namespaces the processes with these ids are; needs root."""
    import toy

    with tempfile.TemporaryDirectory() as folder:
        for process in hosts.values():
            toy.fork(_serve_in_namespaces, Path(folder), process)  # it ends with the host
        server = toy.fork(serve, Path(folder))
        try:
            for host in (*hosts, os.uname().nodename):
                wait_for_server(Path(folder), host)
            yield write_program(Path(folder))
        finally:
            server.terminate()
            server.join(30)


def _serve_in_namespaces(folder: Path, process: int) -> None:
    """Serves on the host that has the namespaces of `process`."""
    setns = ctypes.CDLL(None, use_errno=True).setns  # os.setns from Python 3.12 on
    names = ("uts", "net", "pid_for_children", "mnt")
    for file in [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in names]:
        if setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {names}")
        os.close(file)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(folder,))
    server.start()
    server.join()


def wait_for_server(folder: Path, host: str) -> None:
    """Waits until a server listens for the stand-in in `folder` on `host`."""
    deadline = time.monotonic() + 120
    while not (folder / host).exists():
        assert time.monotonic() < deadline, f"no server listens on {host}"
        time.sleep(0.02)


def serve(folder: Path, address: str = "") -> None:
    """Serves the stand-in in `folder` on this host, until a signal ends it. Workers of its processes come from the fork
    server at `address`: one of their own would import anew all that `warm` has imported."""
    import warm  # noqa: F401  what its processes need not import

    host = os.uname().nodename
    starting = folder / f"{host}.starting"
    context = multiprocessing.get_context("fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(starting))
        listener.listen(64)
        starting.rename(folder / host)
        while True:
            connection, _ = listener.accept()
            context.Process(target=_supervise, args=(connection, listener, address)).start()
            connection.close()


def _supervise(connection: socket.socket, listener: socket.socket, address: str) -> None:
    """Starts the process that is asked for on `connection` and answers with its id, then with its exit code."""
    listener.close()
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    process = multiprocessing.get_context("fork").Process(target=_become, args=(request, files, connection, address))
    process.start()
    for each in files:
        os.close(each)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the stand-in has been killed
        connection.sendall(f"{process.pid}\n".encode())
        ready, _, _ = select.select([connection, process.sentinel], [], [])
        if process.sentinel not in ready:
            process.kill()
        process.join()
        connection.sendall(f"{process.exitcode}\n".encode())
    process.kill()


def _become(request: Mapping[str, Any], files: Sequence[int], connection: socket.socket, address: str) -> None:
    """Runs the module, the code or the script of `request` in this process."""
    connection.close()
    if address:
        fork_server.use(address)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = request["executable"]
    first, *rest = request["arguments"]
    sys.argv = [first, *rest[1:]]
    if first == "-c":
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request["arguments"]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
