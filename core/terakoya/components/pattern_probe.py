"""Tries the regular expressions of a foreign tokenizer.json in a process of its own, within a time limit.

A pattern such as `(a+)+$` takes exponential time, or makes tokenizers' Rust code panic, on a text that fits it badly.
No signal ends that in this process, because the library does not return to Python.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terakoya.errors import UserError

LIMIT_SECONDS = 30.0
"""Time for all patterns of a tokenizer; those of published ones take milliseconds, the process up to a second."""
PROBE = """
import json, sys
from tokenizers import Regex, pre_tokenizers
characters = ("a", "A", "1", " ", "\\n", ".", "_", "\\u3042", "\\u6f22", "\\u30a2")
texts = [each * 2000 + end for each in characters for end in ("", "!", "\\x00")] + ["aA1 .\\u3042\\u6f22" * 300]
for pattern in json.load(sys.stdin):
    print(json.dumps(pattern), flush=True)
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:
        continue  # loading the tokenizer says what is wrong with it
    for text in texts:
        split.pre_tokenize_str(text)
"""


def check(folder: Path) -> None:
    """Tries the patterns of `folder`'s tokenizer.json; without patterns no process is started. Raises UserError if a
    pattern needs more than `LIMIT_SECONDS`, or stops tokenizers."""
    file = folder / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return  # loading the tokenizer raises what is wrong with it
    if not isinstance(content, dict):
        return
    parts = [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    patterns = tuple(dict.fromkeys(pattern for part in parts for pattern in _patterns(part)))
    if patterns and (problem := _try(patterns)):
        raise UserError(f"{file}: {problem}")


def _patterns(part: Any) -> Iterator[str]:
    """Yields the regular expressions in a part of tokenizer.json."""
    if isinstance(part, dict):
        if isinstance(pattern := part.get("Regex"), str):
            yield pattern
        for value in part.values():
            yield from _patterns(value)
    elif isinstance(part, list):
        for value in part:
            yield from _patterns(value)


@functools.cache
def _try(patterns: tuple[str, ...]) -> str:
    """Returns what is wrong with the first bad one of `patterns`; "" if none is."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            input=json.dumps(patterns), capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        printed, trouble = done.stdout, done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()
        trouble = f"took more than {LIMIT_SECONDS:g} s on 2,000 characters"
    if not trouble:
        return ""
    pattern = json.loads(printed.splitlines()[-1]) if printed else patterns[0]
    shown = json.dumps(pattern[:80])
    return (
        f"the regular expression {shown} is not one to split text with: {trouble[:200]}; use a tokenizer with another "
        "pattern"
    )
