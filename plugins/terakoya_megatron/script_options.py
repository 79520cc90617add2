"""Finds a script's training command, parses its options, and records what each option becomes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya_megatron.script_flags import FLAGS
from terakoya_megatron.shell_script import as_written, unknown_text


class Options:
    """The options of a command, and what each of them becomes.

    Attributes:
        given: option -> its words.
        mapped: option -> the key that it becomes.
        ignored: option -> why nothing is lost without it.
        unsupported: option -> what is not supported.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.given: dict[str, list[str]] = {}
        self.mapped: dict[str, str] = {}
        self.ignored: dict[str, str] = {}
        self.unsupported: dict[str, str] = {}
        name = None
        for word in words:
            if re.match(r"--?[A-Za-z]", word):
                name, equals, value = word.lstrip("-").partition("=")
                name = _known_name(name)
                self.given[name] = [value] if equals else []
            elif name is not None:
                self.given[name].append(word)

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def take(
        self,
        name: str,
        parse: Callable[[str], Any],
        key: str | None = None,
        *,
        default: Any = None,
        allow_unknown: bool = False,
    ) -> Any:
        """Returns the option's value and records that it becomes `key`, by default what the table says; `default` if
        the value is not given or unknown.

        With `allow_unknown`, a value that the script alone does not determine is returned as the script writes it.

        Raises:
            UserError: `parse` raises ValueError for the value.
        """
        words = self.given.get(name)
        if words is None:
            return default
        text = " ".join(words)
        if allow_unknown:
            text = as_written(text)
        elif unknown_text(text) is not None:
            self.unsupported[name] = f"{as_written(text)}: unknown from the script alone; set it with --define"
            return default
        try:
            value = parse(text)
        except ValueError:
            raise UserError(f"--{name}: expected {_describe(parse)}, got {text or 'no value'}") from None
        self.mapped[name] = key or FLAGS[name].text
        return value

    def take_switch(self, name: str) -> bool:
        """Returns whether the switch is given; if it is, records what the table says that it becomes."""
        if name in self.given:
            self.mapped[name] = FLAGS[name].text
        return name in self.given

    def mark_unsupported(self, name: str, reason: str) -> None:
        """Records that the option `name` is not supported, instead of an earlier record."""
        self.mapped.pop(name, None)
        self.unsupported[name] = reason

    def mark_ignored(self, name: str, reason: str) -> None:
        """Records that the option `name` is ignored without loss, instead of an earlier record."""
        self.mapped.pop(name, None)
        self.ignored[name] = reason


def parse_integer(text: str) -> int:
    """Parses an integer, also as 1e9 or 12_000. Raises ValueError for another number."""
    number = float(text.replace("_", ""))
    if not number.is_integer():  # infinity and NaN neither
        raise ValueError(text)
    return int(number)


def parse_shares(text: str) -> list[float]:
    """Parses numbers like `998,1,1`, also between quotes, as Megatron does; whole numbers become integers."""
    numbers = [float(number) for number in text.replace(" ", "").strip("'\"").split(",")]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(text)
    return [int(number) if number.is_integer() else number for number in numbers]


def parse_ranges(text: str) -> list[list[int]]:
    """Parses ranges like `5-9 20-21` as pairs."""
    pairs = [[int(number) for number in pair.split("-")] for pair in re.split(r"[\s,]+", text.strip())]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(text)
    return pairs


def _describe(parse: Callable[[str], Any]) -> str:
    descriptions: dict[Callable[[str], Any], str] = {
        parse_integer: "a whole number",
        float: "a number",
        parse_shares: "shares, like 998,1,1",
        parse_ranges: "ranges, like 5-9",
    }
    return descriptions.get(parse, "a value")


def _known_name(name: str) -> str:
    """Returns the option's name as in the table; the programs accept dashes and underscores."""
    dashed = name.replace("_", "-")
    return dashed if dashed in FLAGS and name not in FLAGS else name


def find_command(commands: Sequence[Sequence[str]], file: Path) -> tuple[str, list[str], int | None]:
    """Finds the command that starts a training program with --num-layers.

    Returns:
        The program, the words after it, and the number of nodes that its launcher starts; None if unknown.

    Raises:
        UserError: there is no such command, or more than one.
    """
    matches = []
    for words in commands:
        program = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if program is None and "-m" in words:
            program = words.index("-m") + 1
        if program is not None and any(word.startswith("--num-layers") for word in words[program:]):
            launcher = [part for word in words[:program] for part in word.split("=")]
            nodes = [launcher[i + 1] for i, word in enumerate(launcher[:-1]) if word in ("--nnodes", "--num_nodes")]
            count = int(nodes[-1]) if nodes and nodes[-1].isdecimal() else None
            matches.append((as_written(words[program]), list(words[program + 1 :]), count))
    if len(matches) != 1:
        raise UserError(
            f"{file}: expected one command that starts a program with --num-layers, found {len(matches)}"
            + ("" if matches else "; set unknown variables of the script with --define NAME=VALUE")
        )
    return matches[0]
