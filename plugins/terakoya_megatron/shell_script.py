"""Finds the commands that a shell script would run, with variables and arrays expanded, without running anything.

tree-sitter's grammar of bash parses the script. A value that is known only when the script runs (the output of a
program, an environment variable) is marked as unknown and keeps its text in the script. Tests for files are false.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import import_extra

if TYPE_CHECKING:
    from tree_sitter import Node

UNKNOWN = re.compile("\0(.*?)\0", re.S)
"""Matches an unknown part of a value: the text of the script between two NUL characters."""

PLACEHOLDER = "__terakoya_unknown_"
"""Beginning of the word that stands for an unknown part while the script is interpreted."""

PRINTING = ("echo", "printf")
"""Commands whose arguments are not commands."""

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le, "-eq": operator.eq,
    "-ne": operator.ne,
}  # fmt: skip


def unknown_text(value: str) -> str | None:
    """Returns the script's text for the first unknown part of `value`; None if the value is known."""
    match = UNKNOWN.search(value)
    return match[1] if match else None


def as_written(value: str) -> str:
    """Returns `value`, with unknown parts as the script writes them."""
    return UNKNOWN.sub(r"\1", value)


class Script:
    """Interprets a script from top to bottom and keeps the values of its variables."""

    def __init__(self, folder: Path, defined: Mapping[str, str]) -> None:
        """`folder` is the script's, and `defined` has variable -> value that replaces those which the script assigns.
        Raises UserError where the parser is not installed."""
        tree_sitter, tree_sitter_bash = (
            import_extra(name, "megatron", "reading shell scripts") for name in ("tree_sitter", "tree_sitter_bash")
        )
        self._parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        self._folder = folder
        self._defined = dict(defined)
        self._values: dict[str, list[str]] = {name: [value] for name, value in defined.items()}
        self._unknown_texts: list[str] = []

    def commands(self, text: str) -> Iterator[list[str]]:
        """Yields the words of each command that would run, in order, also of `eval` and `bash -c`."""
        tree = self._parser.parse(text.encode())
        for words in self._walk(tree.root_node):
            yield [
                re.sub(rf"{PLACEHOLDER}(\d+)_", lambda match: f"\0{self._unknown_texts[int(match[1])]}\0", word)
                for word in words
            ]

    def _placeholder(self, text: str) -> str:
        """Returns a word that stands for the value of `text`, without spaces and quotes, since it is parsed again."""
        self._unknown_texts.append(text)
        return f"{PLACEHOLDER}{len(self._unknown_texts) - 1}_"

    # ------------------------------------------------------------------------------------------------ statements

    def _walk(self, node: Node) -> Iterator[list[str]]:
        kind = node.type
        if kind == "variable_assignment":
            self._assign(node)
        elif kind == "if_statement":
            yield from self._walk_if(node)
        elif kind == "while_statement":
            if self._is_true(node.child_by_field_name("condition")):
                yield from self._walk(node.named_children[-1])
        elif kind == "for_statement":
            self._values[_text(node.named_children[0])] = [self._placeholder(f"${_text(node.named_children[0])}")]
            yield from self._walk(node.named_children[-1])
        elif kind == "case_statement":
            yield from self._walk_case(node)
        elif kind == "command":
            words = [word for child in node.named_children for word in self._expand_words(child)]
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
        """Walks the first branch whose condition is true."""
        is_true = self._is_true(node.child_by_field_name("condition"))
        past_then = False
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                if is_true:
                    return
                if child.type == "elif_clause":
                    is_true = self._is_true(child.named_children[0])
                    body = child.named_children[1:]
                else:
                    is_true, body = True, child.named_children
                if is_true:
                    for statement in body:
                        yield from self._walk(statement)
                    return
            elif child.type == "then":
                past_then = True
            elif past_then and is_true and child.is_named:
                yield from self._walk(child)

    def _walk_case(self, node: Node) -> Iterator[list[str]]:
        """Walks the first item whose pattern matches; none if the value is unknown."""
        value = " ".join(self._expand_words(node.named_children[0]))
        if PLACEHOLDER in value:
            return
        for item in (child for child in node.named_children[1:] if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(value, _text(pattern).strip("\"'")) for pattern in patterns):
                for child in item.named_children[len(patterns) :]:
                    yield from self._walk(child)
                return

    def _is_true(self, node: Node | None) -> bool:
        """Whether a condition is true. A comparison of unknown values is false."""
        if node is None:
            return False
        if node.type in ("test_command", "parenthesized_expression") and node.named_child_count == 1:
            return self._is_true(node.named_children[0])
        if node.type == "negated_command" or (node.type == "unary_expression" and _text(node).startswith("!")):
            return not self._is_true(node.named_children[-1])
        if node.type == "unary_expression" and node.named_child_count == 2:
            value = " ".join(self._expand_words(node.named_children[1]))
            return {"-n": value != "", "-z": value == ""}.get(_text(node.named_children[0]), False)
        if node.type in ("binary_expression", "list") and len(node.children) == 3:
            left, sign, right = node.children
            if _text(sign) in ("&&", "||"):
                operands = self._is_true(left), self._is_true(right)
                return all(operands) if _text(sign) == "&&" else any(operands)
            values = [" ".join(self._expand_words(operand)) for operand in (left, right)]
            if any(PLACEHOLDER in value for value in values):
                return False
            if _text(sign) in COMPARISONS:
                return all(re.fullmatch(r"-?\d+", value) for value in values) and COMPARISONS[_text(sign)](
                    int(values[0]), int(values[1])
                )
            return {"=": values[0] == values[1], "==": values[0] == values[1], "!=": values[0] != values[1]}.get(
                _text(sign), False
            )
        return False

    def _assign(self, node: Node) -> None:
        """Stores the value of an assignment, unless the user defined the variable."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "variable_name" or _text(name) in self._defined:
            return
        words = [] if value is None else self._expand_words(value, split=False)
        if value is None or value.type != "array":
            words = [" ".join(words)]
        if "+=" in {child.type for child in node.children}:
            before = self._values.get(_text(name), [])
            joined = [*before, *words] if value is not None and value.type == "array" else ["".join([*before, *words])]
            words = joined
        self._values[_text(name)] = words

    # ----------------------------------------------------------------------------------------------------- words

    def _expand_words(self, node: Node, *, split: bool = True) -> list[str]:
        """Returns the words that `node` expands to. `split` splits an expansion outside quotes at spaces."""
        kind = node.type
        if kind in ("word", "number", "test_operator", "regex", "extglob_pattern"):
            return [re.sub(r"\\(\n|.)", lambda match: match[1].strip("\n"), _text(node))]
        if kind == "raw_string":
            return [_text(node)[1:-1]]
        if kind in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
            values = self._expand(node)
            return [word for value in values for word in value.split()] if split else values
        if kind == "string":
            return self._expand_string(node)
        if kind == "array":
            return [
                word for child in node.named_children if child.type != "comment" for word in self._expand_words(child)
            ]
        if kind == "concatenation":
            words = [""]
            for child in node.named_children:
                more = self._expand_words(child, split=split) or [""]
                words = [*words[:-1], words[-1] + more[0], *more[1:]]
            return words
        if kind in ("comment", "file_redirect", "heredoc_redirect", "variable_assignment"):
            return []
        if kind == "command_name":
            return [word for child in node.named_children for word in self._expand_words(child)]
        return [self._placeholder(_text(node))]

    def _expand_string(self, node: Node) -> list[str]:
        """Expands a string in double quotes to one word, or to the words of an array if the string is only that."""
        children = node.named_children
        if len(children) == 1 and "[@]" in _text(children[0]) and _text(node) == f'"{_text(children[0])}"':
            return self._expand(children[0])
        source, start, text = node.text or b"", node.start_byte, ""
        position = start + 1
        for child in [*children, None]:
            end = child.start_byte if child is not None else start + len(source) - 1
            text += _unescape(source[position - start : end - start].decode())
            if child is not None:
                is_literal = child.type == "string_content"
                raw = _text(child)
                length = len(raw) if is_literal else re.search(r"[$`]|$", raw).start()  # type: ignore[union-attr]
                text += _unescape(raw[:length])  # the grammar includes some preceding line ends in an expansion
                text += "" if is_literal else " ".join(self._expand(child))
                position = child.end_byte
        return [text]

    def _expand(self, node: Node) -> list[str]:
        text = re.sub(r"^[^$`]+", "", _text(node))
        if node.type == "arithmetic_expansion":
            return [self._evaluate_arithmetic(node)]
        if node.type == "command_substitution":
            return self._command_output(node)
        match = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?(?:(:?[-=]|%%?|##?)(.*))?\}?", text.removesuffix("}"), re.S)
        if match is None:
            return [self._placeholder(text)]
        name, _, sign, rest = match.groups()
        values = self._values.get(name)
        if sign in (":-", "-", ":=", "=") and not (values and values[0]):
            default = next(iter(node.named_children[1:]), None)
            return self._expand_words(default) if default is not None else [rest or ""]
        if values is None:
            return [self._placeholder(text)]
        if sign and sign[0] == "%" and "*" not in rest:
            return [value.removesuffix(rest) for value in values]
        if sign and sign[0] == "#" and "*" not in rest:
            return [value.removeprefix(rest) for value in values]
        return [self._placeholder(text)] if sign and sign[0] in "%#" else values

    def _evaluate_arithmetic(self, node: Node) -> str:
        expression = re.sub(r"^[^$]+", "", _text(node))[3:-2]
        names = re.sub(r"\$\{?(\w+)\}?", r"\1", expression)
        try:
            return str(self._evaluate(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return self._placeholder(_text(node))

    def _evaluate(self, node: ast.expr) -> int:
        """Computes an integer expression. Raises ValueError or KeyError if it cannot."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(" ".join(self._values[node.id]))
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
        raise ValueError(ast.dump(node))

    def _command_output(self, node: Node) -> list[str]:
        """Returns the output of `$(...)` for echo and for look-ups of yq; else a placeholder."""
        commands = [child for child in node.named_children if child.type == "command"]
        if len(commands) == 1:
            words = [word for child in commands[0].named_children for word in self._expand_words(child, split=False)]
            if words[:1] == ["echo"]:
                return [" ".join(words[1:])]
            if words[:1] == ["yq"]:
                value = self._look_up_yaml([word for word in words[1:] if not re.fullmatch(r"-\w", word)])
                if value is not None:
                    return [value]
        return [self._placeholder(_text(node))]

    def _look_up_yaml(self, words: list[str]) -> str | None:
        """Returns the output of `yq '.key' FILE`, with FILE relative to the script's folder; None without a value."""
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


def _unescape(text: str) -> str:
    return re.sub(r"\\(\n|[\"$`\\])", lambda match: "" if match[1] == "\n" else match[1], text)
