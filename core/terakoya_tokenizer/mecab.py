"""Splitting lines into words with MeCab, exactly as Transformers' `MecabTokenizer` does.

MeCab (https://taku910.github.io/mecab/) is called through fugashi with `-Owakati`, which writes the words of its best
path with spaces between them. That takes a third of the time of its node objects. Much text is split by `lattice.py`,
which finds the same words sooner.
"""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from terakoya_tokenizer.kernels import load_kernels
from terakoya_tokenizer.lattice import Lattice, is_readable

DICTIONARIES = ("ipadic", "unidic_lite", "unidic")
"""The dictionaries that are Python packages, by their names in Transformers."""

SAFE_CHARACTERS = 32_000
"""Lines up to this length cannot overflow MeCab's path cost: a word costs at most 2 * 32,767 and a line at most
2**31 - 1; beyond that MeCab dereferences a null pointer."""

MECAB_CHARACTERS = 1 << 20
"""MeCab splits so many characters before a `Lattice` is built, which takes as long as it saves on twice as many."""

_CUT_COST = 24 * 2 * 65_536
"""The largest change of a path's cost by a cut: MeCab groups up to 24 unknown characters."""

_PARSE_OPTIONS = ("-d", "-r", "-u", "--dicdir", "--rcfile", "--userdic")

USER_DICTIONARY = ("-u", "--userdic")
"""The option whose value is a user dictionary, or several with commas between them."""

# Settings of MeCab's files that change no word; `max-grouping-size` and `userdic`, among others, do.
_SETTING = re.compile(
    r"\s*(?:[;#].*|(?:cost-factor|bos-feature|(?:unk-)?eval-size|\w+-charset|dicdir|[\w-]+-format.*)\s*=.*)?\s*"
)

# Frequent characters that NFKC replaces independently of their neighbours. After replacing them most documents are
# normalised, and checking that is ten times faster than normalising.
_COMPATIBILITY = [
    (character, unicodedata.normalize("NFKC", character)) for character in "（）…　：！？～＝％；，．－／［］＋＜＞＆"
]

logger = logging.getLogger("terakoya")


class MecabError(ValueError):
    """MeCab cannot start with the given options."""


def dictionary_folder(name: str) -> Path:
    """Returns the folder of the dictionary in the Python package `name`. Raises ModuleNotFoundError if it is not
    installed, MecabError if `name` is not one of `DICTIONARIES`."""
    if name not in DICTIONARIES:
        raise MecabError(f'mecab_dic: expected one of {", ".join(DICTIONARIES)} or null, got "{name}"')
    return Path(importlib.import_module(name).DICDIR)


def dictionary_options(folder: Path) -> str:
    """Returns MeCab's options for the dictionary in `folder`, as Transformers writes them."""
    resources = folder / "mecabrc"
    return f'-d "{folder}" -r "{resources if resources.is_file() else "/dev/null"}"'


def mecab_options(arguments: Mapping[str, Any], find: Callable[[str], Path] = dictionary_folder) -> str:
    """Returns MeCab's options, as Transformers' `MecabTokenizer` derives them from its `arguments`. `find` returns the
    folder of a dictionary."""
    option: str = arguments.get("mecab_option") or ""
    dictionary = arguments.get("mecab_dic", "unidic_lite")
    return option if dictionary is None else f"{dictionary_options(find(dictionary))} {option}".strip()


def change_values(options: str, names: Sequence[str], change: Callable[[str], str]) -> str:
    """Returns MeCab's `options` with the changed values of the option that `names` are: `-u x`, `-ux`, `--userdic x` or
    `--userdic=x`; the same text where nothing changes."""
    words = shlex.split(options)
    changed = []
    for before, word in zip(["", *words], words, strict=False):
        prefixes = [f"{name}=" if name.startswith("--") else name for name in names]
        prefix = next((each for each in prefixes if word.startswith(each) and word not in names), "")
        is_value = bool(prefix) or before in names
        changed.append(
            prefix + change(word.removeprefix(prefix).removeprefix("=" * bool(prefix))) if is_value else word
        )
    return options if changed == words else shlex.join(changed)


def change_user_dictionaries(options: str, change: Callable[[str], str]) -> str:
    """Returns MeCab's `options` with the changed names of the files of user dictionaries."""
    return change_values(options, USER_DICTIONARY, lambda names: ",".join(map(change, names.split(","))))


def place_user_dictionaries(arguments: Mapping[str, Any] | None, folder: Path) -> Mapping[str, Any] | None:
    """Returns the `arguments` of Transformers' `MecabTokenizer` with the paths of those user dictionaries that lie in
    the tokenizer's `folder` and are named without it. MeCab itself looks for them in the working directory."""

    def place(name: str) -> str:
        return str(folder / name) if name and (folder / name).is_file() else name

    option: str = (arguments or {}).get("mecab_option") or ""
    placed = change_user_dictionaries(option, place)
    return arguments if placed == option else {**(arguments or {}), "mecab_option": placed}


class MecabSplitter:
    """Splits lines into words. It holds MeCab's state and belongs to one process.

    The words of a line are one string, separated by single spaces, which is the cheapest form to process. Text after a
    NUL in a line is lost, and words may contain other white space: both as in Transformers.
    """

    stops_at_nul = True

    def __init__(self, options: str, *, normalize: bool = True, white_space: bool = False) -> None:
        """`options` are MeCab's, quoted as for a shell. With `white_space`, words of white space at the end of a line
        are kept, too, and a space inside a word is replaced by a NUL; this is slower. Raises MecabError if MeCab cannot
        start with `options`."""
        self._options = options
        self._normalize, self._white_space = normalize, white_space
        arguments = shlex.split(options)
        # Any other option may change the output of -Owakati; nodes do not depend on the output format.
        self._wakati = not white_space and all(
            argument.startswith(_PARSE_OPTIONS) or not argument.startswith("-") for argument in arguments
        )
        self.parse: Callable[[str], str] = self._parser()
        self._lattice: Lattice | None = None
        self._lattice_folder = _readable_folder(arguments) if self._wakati else None
        self._seen: list[str] = []  # lines that MeCab has split
        self._characters = 0  # in them

    def lines(self, text: str) -> list[str]:
        """Returns the lines of `text`, each up to its first NUL, normalised (NFKC) unless that is switched off."""
        if "\0" in text:  # Transformers stops reading there
            text = "\n".join(line.partition("\0")[0] for line in text.split("\n"))
        return self.normalize(text).split("\n")

    def normalize(self, text: str) -> str:
        """Returns `text` normalised (NFKC) unless that is switched off; the same object where nothing changes. A line
        end stays one, and lines do not change each other."""
        if not self._normalize or text.isascii() or unicodedata.is_normalized("NFKC", text):
            return text
        for character, replacement in _COMPATIBILITY:
            text = text.replace(character, replacement)
        if unicodedata.is_normalized("NFKC", text):
            return text
        return "\n".join(unicodedata.normalize("NFKC", line) for line in text.split("\n"))  # most lines are normal

    def split(self, lines: Sequence[str]) -> list[str]:
        """Returns the words of each of the normalised `lines`, joined by spaces, one string a line."""
        lattice = self._lattice_for(lines)
        if lattice is None:
            return self._split_by_mecab(lines)
        found = lattice.split(lines)
        others = [number for number, words in enumerate(found) if words is None]
        for number, words in zip(others, self._split_by_mecab([lines[number] for number in others]), strict=True):
            found[number] = words
        return cast("list[str]", found)

    def _lattice_for(self, lines: Sequence[str]) -> Lattice | None:
        """Returns what splits `lines`, None for MeCab. It is built when enough text has come."""
        if self._lattice is None and self._lattice_folder is not None:
            self._seen += lines
            self._characters += sum(map(len, lines))
            if self._characters > MECAB_CHARACTERS:
                kernels = load_kernels()
                if kernels is not None:
                    self._lattice = Lattice(kernels, self._lattice_folder, "\n".join(self._seen))
                self._lattice_folder, self._seen = None, []
        return self._lattice

    def _split_by_mecab(self, lines: Sequence[str]) -> list[str]:
        if max(map(len, lines), default=0) <= SAFE_CHARACTERS:
            return list(map(self.parse, lines))
        return [self.parse(line) if len(line) <= SAFE_CHARACTERS else self._split_long(line) for line in lines]

    def _parser(self) -> Callable[[str], str]:
        if self._wakati:
            parse: Callable[[str], str] = self._tagger("-Owakati").parse
            return parse
        tagger = self._tagger()
        space = "\0" if self._white_space else " "
        return lambda line: " ".join(node.surface.replace(" ", space) for node in tagger(line))

    def _tagger(self, output: str = "") -> Any:
        import fugashi

        try:
            return fugashi.GenericTagger(f"{self._options} {output}", quiet=True)
        except RuntimeError as error:
            raise MecabError(f"MeCab cannot start with {self._options}: {error}") from error

    def _split_long(self, line: str) -> str:
        """Returns the words of a line that might be too long for MeCab: split as a whole if it is not, else in parts.

        MeCab keeps the memory of its longest line, so its state is discarded afterwards.
        """
        parts = [line[start : start + SAFE_CHARACTERS] for start in range(0, len(line), SAFE_CHARACTERS)]
        cost = highest = 0
        cost_tagger = self._tagger('-O "" -F "%pc " -U "%pc " -B "" -E ""')
        for part in parts:
            costs = [int(word) for word in cost_tagger.parse(part).split()]
            highest = max(highest, cost + max(costs, default=0))
            cost += (costs[-1] if costs else 0) + _CUT_COST
        if highest < 2**31 - _CUT_COST:
            return self._parser()(line)
        logger.warning(
            "a line of %s characters is too long for MeCab: split into parts of %s characters",
            f"{len(line):,}",
            f"{SAFE_CHARACTERS:,}",
        )
        return " ".join(map(self.parse, parts))


def _readable_folder(arguments: Sequence[str]) -> Path | None:
    """Returns the dictionary's folder in MeCab's `arguments`, None where a `Lattice` might not find the same words."""
    match arguments:
        case ["-d", dictionary, "-r", resources]:
            folder = Path(dictionary)
            settings = [Path(resources), folder / "dicrc"]
            texts = [file.read_text("utf-8", "replace") for file in settings if file.is_file()]
            if is_readable(folder) and all(map(_SETTING.fullmatch, "\n".join(texts).split("\n"))):
                return folder
    return None
