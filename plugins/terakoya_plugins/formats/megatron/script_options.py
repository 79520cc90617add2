"""The options of a command line of Megatron's: read, taken one by one, and accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya_plugins.formats.megatron.script_flags import FLAGS
from terakoya_plugins.formats.megatron.shell_script import shown, unknown


class Options:
    """The options of a command, each with the words behind it, and what has been made of them."""

    def __init__(self, words: Sequence[str]) -> None:
        self.given: dict[str, list[str]] = {}
        self.dropped: dict[str, str] = {}
        self.unplaced: dict[str, str] = {}
        self.became: dict[str, str] = {}
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

    def take(self, name: str, kind: Callable[[str], Any], key: str, *, as_written: bool = False) -> Any:
        """The option's value, noted as having become `key`; None where it is not given or not in the script.

        `as_written` takes a value that the script leaves open as it stands there.

        Raises:
            UserError: a value that is no `kind`.
        """
        words = self.given.get(name)
        if words is None:
            return None
        text = " ".join(words)
        if as_written:
            text = shown(text)
        elif unknown(text) is not None:
            self.unplaced[name] = f"{shown(text)}: the script alone does not tell; say it with --define"
            return None
        try:
            value = kind(text)
        except ValueError:
            raise UserError(f"--{name}: expected {_named(kind)}, got {text or 'nothing'}") from None
        self.became[name] = key
        return value

    def switch(self, name: str, key: str) -> bool:
        """Whether the switch is given; noted as having become `key`."""
        if name in self.given:
            self.became[name] = key
        return name in self.given

    def no_place(self, name: str, reason: str) -> None:
        """Notes that what `name` says has no place after all."""
        self.became.pop(name, None)
        self.unplaced[name] = reason

    def nothing_lost(self, name: str, reason: str) -> None:
        """Notes that nothing is lost without `name` after all."""
        self.became.pop(name, None)
        self.dropped[name] = reason


def whole(text: str) -> int:
    """A whole number, also as 1e9 or 12_000."""
    number = float(text.replace("_", ""))
    if number != int(number):
        raise ValueError(text)
    return int(number)


def shares(text: str) -> list[float]:
    """`998,1,1` as numbers, whole ones where they are."""
    numbers = [float(each) for each in text.replace(" ", "").split(",")]
    return [int(number) if number == int(number) else number for number in numbers]


def ranges(text: str) -> list[list[int]]:
    """`5-9 20-21` as pairs."""
    pairs = [[int(number) for number in each.split("-")] for each in re.split(r"[\s,]+", text.strip())]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(text)
    return pairs


def _named(kind: Callable[[str], Any]) -> str:
    names = {"whole": "a whole number", "float": "a number", "shares": "shares, like 998,1,1", "ranges": "like 5-9"}
    return names.get(kind.__name__, "a value")


def _known_name(name: str) -> str:
    """The option's name as the table has it: the programs take dashes and underscores."""
    dashed = name.replace("_", "-")
    return dashed if dashed in FLAGS and name not in FLAGS else name


def find_command(commands: Sequence[Sequence[str]], file: Path) -> tuple[list[str], int | None]:
    """The options behind the training program among `commands`, and the number of nodes its launcher was told.

    Raises:
        UserError: there is none, or several.
    """
    found = []
    for words in commands:
        place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if place is None and "-m" in words:
            place = words.index("-m") + 1
        if place is not None and any(word.startswith("--num-layers") for word in words[place:]):
            launcher = [word for each in words[:place] for word in each.split("=")]
            nodes = [launcher[i + 1] for i, word in enumerate(launcher[:-1]) if word in ("--nnodes", "--num_nodes")]
            count = int(nodes[-1]) if nodes and nodes[-1].isdecimal() else None
            found.append((list(words[place + 1 :]), count))
    if len(found) != 1:
        raise UserError(
            f"{file}: expected one command that starts a program with --num-layers, found {len(found)}"
            + ("" if found else "; what the script does not tell can be said with --define NAME=VALUE")
        )
    return found[0]
