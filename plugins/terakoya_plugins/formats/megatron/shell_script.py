"""The command that a shell script would run, without running anything: variables, arrays and options filled in.

tree-sitter's grammar of bash reads the script. What only a machine knows (the output of a program, an environment
variable) becomes an `Unknown` with the text that asks for it; files are taken not to be there yet.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Node

UNKNOWN = re.compile("\0(.*?)\0", re.S)
"""Marks, within a value, what is not known: the text of the script between two zeros."""

HIDDEN = "__terakoya_unknown_"
"""Begins the word that stands for one of those while the script is walked."""

PRINTING = ("echo", "printf")

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le, "-eq": operator.eq,
    "-ne": operator.ne,
}  # fmt: skip


def unknown(value: str) -> str | None:
    """The text of the script that says what a value should be, where the script alone does not tell; else None."""
    found = UNKNOWN.search(value)
    return found[1] if found else None


def shown(value: str) -> str:
    """`value` as it is, or as the script writes it."""
    return UNKNOWN.sub(r"\1", value)


class Script:
    """A script that is walked from top to bottom, remembering what variables hold.

    `defined` are values that stand for whatever the script assigns to these names.
    """

    def __init__(self, folder: Path, defined: Mapping[str, str]) -> None:
        try:
            import tree_sitter
            import tree_sitter_bash
        except ImportError as error:
            raise UserError(f"reading shell scripts needs {error.name}: pip install 'terakoya[scripts]'") from None
        self._parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        self._folder = folder
        self._defined = dict(defined)
        self._values: dict[str, list[str]] = {name: [value] for name, value in defined.items()}
        self._hidden: list[str] = []

    def commands(self, text: str) -> Iterator[list[str]]:
        """The words of each command that would be run, in order; commands made by `eval` and `bash -c` included."""

        tree = self._parser.parse(text.encode())
        for words in self._walk(tree.root_node):
            yield [
                re.sub(rf"{HIDDEN}(\d+)_", lambda match: f"\0{self._hidden[int(match[1])]}\0", word) for word in words
            ]

    def _mark(self, text: str) -> str:
        """A word that stands for what `text` would be: without spaces and quotes, since words are read once more."""
        self._hidden.append(text)
        return f"{HIDDEN}{len(self._hidden) - 1}_"

    # ------------------------------------------------------------------------------------------------ statements

    def _walk(self, node: Node) -> Iterator[list[str]]:
        kind = node.type
        if kind == "variable_assignment":
            self._assign(node)
        elif kind == "if_statement":
            yield from self._walk_if(node)
        elif kind == "while_statement":
            if self._holds(node.child_by_field_name("condition")):
                yield from self._walk(node.named_children[-1])
        elif kind == "for_statement":
            self._values[_text(node.named_children[0])] = [self._mark(f"${_text(node.named_children[0])}")]
            yield from self._walk(node.named_children[-1])
        elif kind == "case_statement":
            yield from self._walk_case(node)
        elif kind == "command":
            words = [word for child in node.named_children for word in self._words(child)]
            inner = next((word for word in words if ".py" in word and re.search(r"\s", word.strip())), None)
            if words[:1] == ["eval"]:
                yield from self.commands(" ".join(words[1:]))
            elif inner is not None and words[0] not in PRINTING:
                yield from self.commands(inner)
            elif words and words[0] not in PRINTING:
                yield words
        else:
            for child in node.named_children:
                yield from self._walk(child)

    def _walk_if(self, node: Node) -> Iterator[list[str]]:
        """The branch whose condition holds; a condition that cannot be told does not."""
        holds = self._holds(node.child_by_field_name("condition"))
        past_then = False
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                if holds:
                    return
                if child.type == "elif_clause":
                    holds = self._holds(child.named_children[0])
                    body = child.named_children[1:]
                else:
                    holds, body = True, child.named_children
                if holds:
                    for inner in body:
                        yield from self._walk(inner)
                    return
            elif child.type == "then":
                past_then = True
            elif past_then and holds and child.is_named:
                yield from self._walk(child)

    def _walk_case(self, node: Node) -> Iterator[list[str]]:
        """The first item whose pattern fits; none where the value is not known."""
        value = " ".join(self._words(node.named_children[0]))
        if HIDDEN in value:
            return
        for item in (child for child in node.named_children[1:] if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(value, _text(each).strip("\"'")) for each in patterns):
                for child in item.named_children[len(patterns) :]:
                    yield from self._walk(child)
                return

    def _holds(self, node: Node | None) -> bool:
        if node is None:
            return False
        if node.type in ("test_command", "parenthesized_expression") and node.named_child_count == 1:
            return self._holds(node.named_children[0])
        if node.type == "negated_command" or (node.type == "unary_expression" and _text(node).startswith("!")):
            return not self._holds(node.named_children[-1])
        if node.type == "unary_expression" and node.named_child_count == 2:
            value = " ".join(self._words(node.named_children[1]))
            return {"-n": value != "", "-z": value == ""}.get(_text(node.named_children[0]), False)
        if node.type in ("binary_expression", "list") and len(node.children) == 3:
            left, sign, right = node.children
            if _text(sign) in ("&&", "||"):
                both = self._holds(left), self._holds(right)
                return all(both) if _text(sign) == "&&" else any(both)
            values = [" ".join(self._words(each)) for each in (left, right)]
            if any(HIDDEN in value for value in values):
                return False
            if _text(sign) in COMPARED:
                return all(re.fullmatch(r"-?\d+", value) for value in values) and COMPARED[_text(sign)](
                    int(values[0]), int(values[1])
                )
            return {"=": values[0] == values[1], "==": values[0] == values[1], "!=": values[0] != values[1]}.get(
                _text(sign), False
            )
        return False

    def _assign(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "variable_name" or _text(name) in self._defined:
            return
        words = [] if value is None else self._words(value, split=False)
        if value is None or value.type != "array":
            words = [" ".join(words)]
        if "+=" in {child.type for child in node.children}:
            before = self._values.get(_text(name), [])
            joined = [*before, *words] if value is not None and value.type == "array" else ["".join([*before, *words])]
            words = joined
        self._values[_text(name)] = words

    # ----------------------------------------------------------------------------------------------------- words

    def _words(self, node: Node, *, split: bool = True) -> list[str]:
        """What the node expands to. An expansion outside quotes is split at spaces, unless it is assigned."""
        kind = node.type
        if kind in ("word", "number", "test_operator", "regex", "extglob_pattern"):
            return [re.sub(r"\\(\n|.)", lambda match: match[1].strip("\n"), _text(node))]
        if kind == "raw_string":
            return [_text(node)[1:-1]]
        if kind in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
            values = self._expand(node)
            return [word for value in values for word in value.split()] if split else values
        if kind == "string":
            return self._quoted(node)
        if kind == "array":
            return [word for child in node.named_children if child.type != "comment" for word in self._words(child)]
        if kind == "concatenation":
            words = [""]
            for child in node.named_children:
                more = self._words(child, split=split) or [""]
                words = [*words[:-1], words[-1] + more[0], *more[1:]]
            return words
        if kind in ("comment", "file_redirect", "heredoc_redirect", "variable_assignment"):
            return []
        if kind == "command_name":
            return [word for child in node.named_children for word in self._words(child)]
        return [self._mark(_text(node))]

    def _quoted(self, node: Node) -> list[str]:
        """A string in double quotes: one word, or those of an array that stands in it alone."""
        inner = node.named_children
        if len(inner) == 1 and "[@]" in _text(inner[0]) and _text(node) == f'"{_text(inner[0])}"':
            return self._expand(inner[0])
        source, place, text = node.text or b"", node.start_byte, ""
        at = place + 1
        for child in [*inner, None]:
            end = child.start_byte if child is not None else place + len(source) - 1
            text += _unescaped(source[at - place : end - place].decode())
            if child is not None:
                literal = child.type == "string_content"
                raw = _text(child)
                start = len(raw) if literal else re.search(r"[$`]|$", raw).start()  # type: ignore[union-attr]
                text += _unescaped(raw[:start])  # the grammar counts some line ends before an expansion as its own
                text += "" if literal else " ".join(self._expand(child))
                at = child.end_byte
        return [text]

    def _expand(self, node: Node) -> list[str]:
        """The values that an expansion stands for."""
        text = re.sub(r"^[^$`]+", "", _text(node))
        if node.type == "arithmetic_expansion":
            return [self._calculate(node)]
        if node.type == "command_substitution":
            return self._output(node)
        match = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?(?:(:?[-=]|%%?|##?)(.*))?\}?", text.removesuffix("}"), re.S)
        if match is None:
            return [self._mark(text)]
        name, _, sign, rest = match.groups()
        values = self._values.get(name)
        if sign in (":-", "-", ":=", "=") and not (values and values[0]):
            default = next(iter(node.named_children[1:]), None)
            return self._words(default) if default is not None else [rest or ""]
        if values is None:
            return [self._mark(text)]
        if sign and sign[0] == "%" and "*" not in rest:
            return [value.removesuffix(rest) for value in values]
        if sign and sign[0] == "#" and "*" not in rest:
            return [value.removeprefix(rest) for value in values]
        return [self._mark(text)] if sign and sign[0] in "%#" else values

    def _calculate(self, node: Node) -> str:
        """The whole number that `$((...))` is."""
        expression = re.sub(r"^[^$]+", "", _text(node))[3:-2]
        names = re.sub(r"\$\{?(\w+)\}?", r"\1", expression)
        try:
            return str(self._number(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return self._mark(_text(node))

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(" ".join(self._values[node.id]))
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._number(node.left), self._number(node.right))
        raise ValueError(ast.dump(node))

    def _output(self, node: Node) -> list[str]:
        """What a program in `$(...)` prints, of the few whose answer stands in files: echo, and yq's look-ups."""
        commands = [child for child in node.named_children if child.type == "command"]
        if len(commands) == 1:
            words = [word for child in commands[0].named_children for word in self._words(child, split=False)]
            if words[:1] == ["echo"]:
                return [" ".join(words[1:])]
            if words[:1] == ["yq"]:
                value = self._look_up([word for word in words[1:] if not re.fullmatch(r"-\w", word)])
                if value is not None:
                    return [value]
        return [self._mark(_text(node))]

    def _look_up(self, words: list[str]) -> str | None:
        """The value of `yq '.key' FILE`, the file lying beside the script; None if it is not there."""
        import yaml

        if len(words) != 2 or not re.fullmatch(r"\.[\w.]+", words[0]) or not (self._folder / words[1]).is_file():
            return None
        value: Any = yaml.safe_load((self._folder / words[1]).read_text(encoding="utf-8"))
        for key in words[0][1:].split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict | list):
            return None
        return str(value).lower() if isinstance(value, bool) else str(value)


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _unescaped(text: str) -> str:
    """What stands between double quotes, its escapes undone."""
    return re.sub(r"\\(\n|[\"$`\\])", lambda match: "" if match[1] == "\n" else match[1], text)
