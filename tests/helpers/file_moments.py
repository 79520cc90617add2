"""What a process finds and does at each of its file calls, so that equal faults need one try.

- Kills before two calls of a command are equal where its folder has the same names, and files with the same content. So
  are two torn writes of the same file. All else is gone with the process. What is in a draft counts by its name alone:
  no command reads what another process has left there, and `World.check` spoils it.
- Errors of two calls are equal where kind and number of the error, kind of call, Python's call stack, path, and the
  names in the folder are the same, whatever the model is that the command trains. A checkpoint counts as one name, and
  numbers in names do not count.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARYING = re.compile(r"(?<=\.tmp)\w{6}$|[0-9a-f]{6,}|\d+")
"""What differs between starts, models and steps in names: numbers, hashes, the random part of safetensors' drafts."""

DRAFT = re.compile(r"(^|/)\.([^/]+\.tmp|tmp\w{6}|staging-[^/]+|removing-[^/]+)(/|$)")
"""Paths of what has no final name yet, or none any more."""
CHECKPOINT = re.compile(r"(^|/)checkpoints/step-\d+(/|$)")


@dataclass(frozen=True)
class Moment:
    """A call: its number, kind and path, where the program made it, and hashes of what is in the folder before it."""

    number: int
    kind: str
    path: str
    stack: str
    names: str
    content: str


def observer(folder: Path, log: Path) -> Any:
    """Returns the function that `file_faults.c` calls before each call below `folder`; it writes a line of `log`."""
    lines = log.open("w", buffering=1)

    def note(number: int) -> None:
        stack = " ".join(_stack())
        names, content = look(folder)
        lines.write("\t".join((str(number), hashlib.sha256(stack.encode()).hexdigest(), names, content)) + "\n")

    return ctypes.CFUNCTYPE(None, ctypes.c_long)(note)


def _stack() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def look(folder: Path) -> tuple[str, str]:
    """Returns hashes of the names in `folder` as they count for errors, and of names and contents."""
    names, contents = [], hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders.sort()
        below = os.path.relpath(parent, folder)
        if not CHECKPOINT.search(below):
            names += [same(f"{below}/{each}") for each in (*folders, *files)]
        for each in sorted(files):
            path = f"{below}/{each}"
            content = b"" if DRAFT.search(path) else Path(parent, each).read_bytes()
            contents.update(f"{same(path) if DRAFT.search(path) else path} {len(content)}\n".encode() + content)
        contents.update(f"{below} {folders}\n".encode())
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest(), contents.hexdigest()


def same(path: str) -> str:
    """Returns `path` without what varies."""
    return "/".join(VARYING.sub("0", each) for each in path.split("/"))


def read(log: Path, folder: Path) -> list[Moment]:
    """Returns the calls below `folder` that `log` and the lines of `observer` tell of."""
    calls = [line.split("\t") for line in log.read_text().splitlines() if not line.startswith("0\t")]
    seen = [line.split("\t") for line in Path(f"{log}.moments").read_text().splitlines()]
    looked = {number: rest for number, *rest in seen}
    return [
        Moment(int(number), kind, same(os.path.relpath(path, folder)), *looked[number])
        for number, kind, _, path, _ in calls
    ]
