"""Compares the Japanese catalogue with the texts in the code: `python tools/catalogue.py` lists what it lacks.

`--check` fails where an entry has no text in the code any more, where its placeholders differ from the translation's,
or where a help text, the meaning of a key or a message has no entry; `--update` removes the entries without a text,
and adds an empty one for each text that lacks its own.
`docs/design/languages.md` says what a text, a placeholder and an entry are.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE / "core"), str(HERE / "plugins")]

from terakoya.config.keys import all_groups  # noqa: E402
from terakoya.plugins import load  # noqa: E402
from terakoya_japanese.catalogue import PLACEHOLDER, Entry, read_catalogue, write_catalogue  # noqa: E402

SOURCES = (
    "core/terakoya", "core/terakoya_tokenizer",
    *(str(each.parent.relative_to(HERE)) for each in sorted((HERE / "plugins").glob("terakoya_*/__init__.py"))),
)  # fmt: skip
CATALOGUE = HERE / "plugins/terakoya_japanese/ja.po"
SHOWN = (
    "UserError", "ChangeError", "FileError", "DamagedError", "Stopped", "TemporaryFailure", "Diverged", "RankLostError",
    "ValueError", "Finding", "print", "warn", "warning", "info", "error", "say", "announce", "add_column",
    "progress_bar", "translated",
)  # fmt: skip
"""The functions whose texts a user sees; of another function that builds a text, and of a constant, nothing is known.
Python's own `print` is not one of them: only consoles translate. What needs no Japanese, such as code to copy, is
printed as rich's `Text`."""
KINDS = {"help": "of help", "meaning": "of keys", "shown": "other messages"}
"""The kinds of texts of which each needs a translation, and what they are called."""
FINDINGS = re.compile("(?<![a-z])(conflict|problem|obstacle|fault)s?$")
"""The names of functions that return or yield messages, and of lists to which messages are appended."""
LOGGED = ("warning", "info", "error")
"""Those that fill in the values of `%s` themselves."""


@dataclass(frozen=True)
class Text:
    """A text in the code, `{name}` where a value is filled in.

    Attributes:
        text: the words; paragraphs of help in one line.
        file: where it is, relative to the repository.
        kind: "help", "meaning" (of a key), "shown" (given to one of `SHOWN`) or "other".
    """

    text: str
    file: str
    kind: str

    @property
    def shape(self) -> str:
        """The text without the names of its placeholders, which follow the code and change with it."""
        return shape_of(self.text)


def shape_of(text: str) -> str:
    """Returns `text` without the names of its placeholders."""
    return PLACEHOLDER.sub("{}", text)


def texts() -> Iterator[Text]:
    """Yields every text of the code, also the parts of longer ones, the meaning and the unit of every key of a
    settings file, and what each preset is for."""
    for group in all_groups(load((), ("third-party",))):
        for setting in group.settings:
            yield from (Text(each, "docs/reference/keys.md", "meaning") for each in (setting.meaning, setting.unit))
    for file in sorted((HERE / "parameters").glob("*.json")):
        purpose = json.loads(file.read_text(encoding="utf-8")).get("_comment", "").partition(" parameters: ")[2]
        if purpose:
            yield Text(purpose, str(file.relative_to(HERE)), "shown")
    for source in SOURCES:
        for file in sorted((HERE / source).rglob("*.py")):
            yield from texts_of(file.read_text(encoding="utf-8"), str(file.relative_to(HERE)))


def texts_of(code: str, file: str) -> Iterator[Text]:
    """Yields every text of `code`; `file` is its name."""
    kinds: dict[int, str] = {}
    values: dict[int, list[ast.expr]] = {}
    parts: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and _is_command(node, file):
            for paragraph in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n"):
                yield Text(" ".join(paragraph.split()), file, "help")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))  # a docstring
        if isinstance(node, ast.FunctionDef) and FINDINGS.search(node.name):
            kinds.update({id(each): "shown" for each in _results(node)})
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SHOWN and ast.unparse(node.func) != "print":
                place = 2 if name == "Finding" else 0
                kinds.update({id(each): "shown" for each in node.args[place : place + 1]})
            if name == "append" and FINDINGS.search(ast.unparse(node.func).removesuffix(".append")):
                kinds.update({id(each): "shown" for each in node.args})
            if name in LOGGED:
                values.update({id(each): node.args[1:] for each in node.args[:1]})
            kinds.update({id(each.value): "help" for each in node.keywords if each.arg == "help"})
        if id(node) in parts or not isinstance(node, ast.expr):
            continue
        found = _template(node, [])
        if found is not None:
            parts.update(id(each) for each in _inside(node))
            kind = kinds.get(id(node), "other")
            if id(node) in values:
                found = _logged(found, values[id(node)])
            yield Text(" ".join(found.split()) if kind == "help" else found, file, kind)


def _logged(text: str, values: list[ast.expr]) -> str:
    """Returns the text of a log message with `{name}` for `%s` and the like."""
    names: list[str] = []
    rest = iter(values)

    def name_next(sign: re.Match[str]) -> str:
        return "%" if sign[0] == "%%" else _placeholder(next(rest, ast.Name("value")), names)

    return re.sub(r"%%|%\.?\d*[sdfg]", name_next, text) if values else text


def _is_command(function: ast.FunctionDef, file: str) -> bool:
    arguments = function.args.args
    return "/commands/" in file and function.name in _commands() and not any(each.arg == "self" for each in arguments)


@cache
def _commands() -> set[str]:
    """Returns the names of the functions that `register_commands` of the core and of plugins names."""
    code = "".join(file.read_text(encoding="utf-8") for source in SOURCES for file in (HERE / source).rglob("*.py"))
    return set(re.findall(r"\bCommand\(\s*(?:\w+\.)?(\w+),", code))


def _results(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yields what a function returns or yields, also each branch of a choice and each item of a list."""
    values = [each.value for each in ast.walk(function) if isinstance(each, (ast.Return, ast.Yield)) and each.value]
    for value in values:
        values += [value.body, value.orelse] if isinstance(value, ast.IfExp) else []
        values += value.elts if isinstance(value, ast.List) else []
        yield value


def _inside(node: ast.expr) -> Iterator[ast.AST]:
    """Yields the literal pieces of a text, which are no texts of their own."""
    if isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            if isinstance(side, (ast.Constant, ast.JoinedStr)) or _template(side, []) is not None:
                yield side
                yield from _inside(side)
    if isinstance(node, ast.JoinedStr):
        yield from (each for each in node.values if isinstance(each, ast.Constant))
        for each in node.values:
            if isinstance(each, ast.FormattedValue) and each.format_spec is not None:
                yield each.format_spec
                yield from ast.walk(each.format_spec)


def _template(node: ast.expr, names: list[str]) -> str | None:
    """Returns the text of a literal, an f-string or a sum with one of these; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(each.value) if isinstance(each, ast.Constant) else _placeholder(each.value, names)  # type: ignore[attr-defined]
            for each in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        known = [_template(side, []) for side in (node.left, node.right)]
        if known != [None, None]:
            return "".join(_template(side, names) or _placeholder(side, names) for side in (node.left, node.right))
    return None


def _placeholder(value: ast.expr, names: list[str]) -> str:
    name = _name(value)
    number = names.count(name) + 1
    names.append(name)
    return f"{{{name}{number if number > 1 else ''}}}"


def _name(value: ast.expr) -> str:
    """Returns what a translator calls a value that is filled in."""
    if isinstance(value, ast.Name):
        return value.id.strip("_").lower() or "value"
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_").lower()
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id not in (
            "len",
            "str",
            "repr",
            "min",
            "max",
            "sum",
            "abs",
            "int",
        ):
            return _name(value.func)
        return _name(value.args[0]) if value.args else _name(value.func)
    if isinstance(value, (ast.Subscript, ast.BinOp)):
        return _name(value.value if isinstance(value, ast.Subscript) else value.left)
    if isinstance(value, (ast.GeneratorExp, ast.ListComp)):
        return _name(value.generators[0].iter)
    if isinstance(value, ast.IfExp):
        return _name(value.body)
    if isinstance(value, ast.BoolOp):
        return _name(value.values[0])
    return "value"


def shapes_of(code: Iterable[Text]) -> set[str]:
    """Returns the shapes of all texts; a name is also shown with spaces for its underscores."""
    shapes = {text.shape for text in code}
    return shapes | {shape.replace("_", " ") for shape in shapes}


def update(entries: list[Entry], code: list[Text]) -> list[Entry]:
    """Returns `entries` without those that have no text any more, and one without a translation for each new text."""
    shapes = shapes_of(code)
    lacking = [text for kind in missing(entries, code).values() for text in kind]
    return [*(each for each in entries if shape_of(each.source) in shapes), *(Entry(each.text, "") for each in lacking)]


def faults(entries: list[Entry], code: list[Text]) -> list[str]:
    """Returns what is wrong with the catalogue, one line each."""
    shapes = shapes_of(code)
    found = []
    for entry in entries:
        if shape_of(entry.source) not in shapes:
            found.append(f"not in the code any more: {entry.source!r}")
        if sorted(PLACEHOLDER.findall(entry.source)) != sorted(PLACEHOLDER.findall(entry.translation)):
            found.append(f"other placeholders in the translation: {entry.source!r}")
        if not entry.translation:
            found.append(f"no translation: {entry.source!r}")
        if "{" in entry.source and len(re.findall("[a-z]", PLACEHOLDER.sub("", entry.source))) < 3:
            found.append(f"too few words, it would match other texts: {entry.source!r}")
    sources = [shape_of(entry.source) for entry in entries]
    found += [f"twice: {each!r}" for each in sorted({each for each in sources if sources.count(each) > 1})]
    return found


def missing(entries: list[Entry], code: list[Text]) -> dict[str, list[Text]]:
    """Returns the texts without an entry, by kind, each once; of the kind "other" none are known to be shown."""
    known = {shape_of(entry.source) for entry in entries}
    lacking: dict[str, dict[str, Text]] = {kind: {} for kind in KINDS}
    for text in code:
        if text.kind in lacking and re.search("[a-z]{2}", text.shape.replace("{}", "")) and text.shape not in known:
            lacking[text.kind].setdefault(text.shape, text)
    return {kind: list(each.values()) for kind, each in lacking.items()}


def main() -> None:
    """Prints what the catalogue lacks and exits with 1 where `--check` fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if anything is wrong")
    parser.add_argument("--update", action="store_true", help="remove old entries, add empty ones for new texts")
    options = parser.parse_args()
    code, entries = list(texts()), read_catalogue(CATALOGUE)
    if options.update:
        updated = update(entries, code)
        write_catalogue(CATALOGUE, updated)
        added, removed = (len({each.source for each in one} - {each.source for each in other})
                          for one, other in ((updated, entries), (entries, updated)))  # fmt: skip
        print(f"{CATALOGUE}: {len(updated)} entries, {added} added without a translation, {removed} removed")
        return
    wrong, lacking = faults(entries, code), missing(entries, code)
    for kind, found in lacking.items():
        wrong += [f"{kind} without a translation, {each.file}: {each.text!r}" for each in found]
    for line in wrong:
        print(line)
    counts = [f"{len(lacking[kind])} {name}" for kind, name in KINDS.items()]
    print(f"{len(entries)} entries; missing: {', '.join(counts)}")
    sys.exit(bool(options.check and wrong))


if __name__ == "__main__":
    main()
