"""Commands whose file calls go wrong, one at a time, and what a power cut would leave of them.

`start` starts one process that has imported `warm` and has `file_faults.c` preloaded. It forks for each command, so
that a command costs no imports.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import file_moments
import pytest

FULL = ("f", errno.ENOSPC)
KILL, TORN = ("k", 0), ("t", 0)
ONCE = {name: ("e", getattr(errno, name)) for name in ("ENOSPC", "EIO", "ESTALE")}
ACTIONS = {"kill": KILL, "torn write": TORN, "full disk": FULL, **ONCE}
"""What goes wrong: the letter and the error of `file_faults_arm`."""
NAMES = ("rename", "create", "mkdir", "unlink")
"""Calls that change the names in a folder."""
SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """How a command ended: the exit code of each rank (negative: a signal), what rank 0 printed, the calls counted."""

    codes: list[int]
    printed: str
    calls: int


@dataclass(frozen=True)
class Command:
    """`terakoya ARGUMENTS` on a rank for each of `variables`, with a fault in a call of `rank` below `folder`.

    What rank r prints goes to the file `FOLDER.r.txt`. With `log`, the calls of `rank` are its lines, and LOG.moments
    has a line of `file_moments` for each.
    """

    arguments: Sequence[str]
    folder: str
    call: int = 0
    action: tuple[str, int] = ("", 0)
    rank: int = 0
    variables: Sequence[Mapping[str, str]] = field(default_factory=lambda: [{}])
    log: str = ""


class FileFaults:
    """Runs commands one after another."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, command: Command) -> Ended:
        """Runs `command` to its end."""
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(asdict(command)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the server died"
        return Ended(**json.loads(answer))


@contextmanager
def start(folder: Path) -> Iterator[FileFaults]:
    """Compiles the library into `folder` and starts the server. Needs a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "file_faults.so"
    source = Path(__file__).with_name("file_faults.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    variables = {
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    server = subprocess.Popen(
        [sys.executable, __file__, str(library)], env={**os.environ, **variables}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield FileFaults(server)
    finally:
        server.communicate(timeout=30)


# ------------------------------------------------------------------------------------------------------- power cuts


def power_cut_problems(log: Path) -> list[str]:
    """What a power cut could have left half under a name that something was renamed to, by the calls in `log`.

    The disk keeps the order of names, as journals do; of contents it keeps what was flushed. So all of a file or folder
    must have been flushed before it was renamed, and the name after that before the command ended.
    """
    unflushed: dict[str, str] = {}  # inode -> path
    changed: set[str] = set()  # folders whose names were not flushed
    renamed: dict[str, str] = {}  # folder -> what was renamed into it since it was flushed
    problems, tree = [], []
    for line in log.read_text().splitlines():
        _, kind, inode, path, second = line.split("\t")
        parent = str(Path(path).parent)
        if kind.startswith("tree"):
            tree.append((kind, inode, path))
            continue
        if kind in ("write", "truncate", "empty"):
            unflushed[inode] = path
        elif kind == "fsync":
            unflushed.pop(inode, None)
            changed.discard(path)
            renamed.pop(path, None)
        elif kind == "unlink":
            unflushed.pop(inode, None)
            changed.discard(path)
            renamed = {folder: each for folder, each in renamed.items() if each != path}
        if kind == "rename":
            problems += [f"{each} was not flushed before {second} got its name" for kind, number, each in tree
                         if number in unflushed or (kind == "tree folder" and each in changed)]  # fmt: skip
            renamed[str(Path(second).parent)] = second
            changed = {second + each.removeprefix(path) if each.startswith(path + "/") else each for each in changed}
        if kind in NAMES:
            changed.add(parent)
        tree = []
    return problems + [f"the name of {each} was not flushed" for each in renamed.values()]


# ------------------------------------------------------------------------------------------------------- the server


def serve(library: Path) -> None:
    """Runs the commands that arrive as lines on standard input."""
    import warm  # noqa: F401  what commands need not import

    from terakoya.plugins import registry
    from terakoya.training import trainer

    registry()
    trainer.RETRY_SECONDS = 0.05
    arm = ctypes.CDLL(str(library))
    for line in sys.stdin:
        command = Command(**json.loads(line))
        outputs = [Path(f"{command.folder}.{rank}.txt") for rank in range(len(command.variables))]
        children = [_fork(arm, command, rank, output) for rank, output in enumerate(outputs)]
        codes = _wait(children)
        counted = Path(f"{command.folder}.calls")
        calls = int(counted.read_text()) if counted.exists() else 0
        counted.unlink(missing_ok=True)
        sys.stdout.write(json.dumps(asdict(Ended(codes, outputs[0].read_text(), calls))) + "\n")
        sys.stdout.flush()


def _fork(arm: Any, command: Command, rank: int, output: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(command.variables[rank])
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        chosen = rank == command.rank
        letter, error = command.action
        if chosen:
            if command.log:
                observer = file_moments.observer(Path(command.folder), Path(f"{command.log}.moments"))
                arm.file_faults_observe(observer)
            arm.file_faults_arm(
                command.folder.encode(), ctypes.c_long(command.call), ctypes.c_char(letter.encode() or b"\0"), error,
                command.log.encode(),
            )  # fmt: skip
        from terakoya.commands.main import main

        try:
            main(command.arguments)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:  # noqa: BLE001 - the traceback is what tests look for
            traceback.print_exc()
        if chosen:
            Path(f"{command.folder}.calls").write_text(str(arm.file_faults_count()))
    finally:
        os._exit(code)


def _wait(children: Sequence[int]) -> list[int]:
    """The exit codes of `children`; those that still run after `SECONDS` are killed."""
    deadline, codes = time.monotonic() + SECONDS, dict.fromkeys(children, None)
    while None in codes.values():
        for child in [child for child, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
