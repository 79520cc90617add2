"""Help pages in another language: the texts of commands and options, and lines of characters that take two columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len

from terakoya_japanese.lines import wrap

HEADINGS = {"Arguments": "引数", "Options": "オプション", "Commands": "コマンド"}
"""What the parser writes over a list."""
OPTIONS = {
    "Show this message and exit.": "この説明を表示して終わります。",
    "Install completion for the current shell.": "今のシェルに補完をインストールします。",
    "Show completion for the current shell, to copy it or customize the installation.": "今のシェルの補完を表示します"
    "(写したり、インストールを変えたりするため)。",
}
"""The help of the parser's own options."""
_WORDS = (
    (r"default: ", "既定値: "),
    (r"required(?=[;\]])", "必須"),
    (r"env var: ", "環境変数: "),
)
"""What the parser writes behind the help of an option, in brackets."""


def translate_help(command: Any, translated: Callable[[str], str]) -> None:
    """Translates the help of `command` and of all commands below it, in place."""
    command.context_class = type(
        "TranslatedContext", (command.context_class,), {"formatter_class": formatter_for(command)}
    )
    text = inspect.cleandoc(command.help or "")
    paragraphs = [translated(" ".join(paragraph.split())) for paragraph in text.split("\n\n")]
    command.help = "\n\n".join(paragraphs)
    command.short_help = paragraphs[0].partition("。")[0]
    if command.epilog:
        command.epilog = command.epilog.replace("Example:", "例:")
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = translated(" ".join(parameter.help.split()))
    for each in getattr(command, "commands", {}).values():
        translate_help(each, translated)


def formatter_for(command: Any) -> type:
    """Returns the class that lays out the help of `command`, with lines by columns instead of characters."""
    base: Any = command.context_class.formatter_class

    class Formatter(base):
        """Lays out help."""

        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            """Writes the line of the command and its arguments."""
            start = f"使い方: {prog} "
            lines = list(wrap(args, self.width - cell_len(start))) or [""]
            self.write("".join(f"{start if line is lines[0] else ' ' * cell_len(start)}{line}\n" for line in lines))

        def write_heading(self, heading: str) -> None:
            """Writes the title of a list."""
            super().write_heading(HEADINGS.get(heading, heading))

        def write_text(self, text: str) -> None:
            """Writes paragraphs; one that begins with a line of \\b keeps its lines."""
            indent = " " * self.current_indent
            shown = []
            for paragraph in text.split("\n\n"):
                if paragraph.startswith("\b\n"):
                    shown.append("\n".join(indent + line for line in paragraph.split("\n")[1:]))
                else:
                    lines = wrap(" ".join(paragraph.split()), self.width - self.current_indent)
                    shown.append("\n".join(indent + line for line in lines))
            self.write("\n\n".join(shown) + "\n")

        def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
            """Writes a list of names and their meanings in two columns."""
            room = min(max(cell_len(name) for name, _ in rows), col_max) + col_spacing
            for name, meaning in rows:
                first = f"{'':>{self.current_indent}}{name}"
                lines = list(wrap(_own_words(OPTIONS.get(meaning) or meaning), max(self.width - room - 2, 10)))
                if cell_len(name) > room - col_spacing or not lines:
                    self.write(first + "\n")
                else:
                    self.write(first + " " * (room - cell_len(name)) + lines.pop(0) + "\n")
                for line in lines:
                    self.write(" " * (room + self.current_indent) + line + "\n")

    return Formatter


def _own_words(text: str) -> str:
    """Returns the help of an option with the parser's words in the brackets at its end translated."""
    found = re.search(r"\[(?:default: |required|env var: |x|[0-9.]+<)[^\]]*(?:\][^\]]*)?\]$", text)
    if found is None:
        return text
    end = found[0]
    for pattern, word in _WORDS:
        end = re.sub(pattern, word, end)
    return text[: found.start()] + end


ERRORS = (
    (r"Invalid value for '?(.+?)'?: (?:Value error, )?(.*)", r"\1: \2"),
    (r"Option '(.+)' requires an argument\.", r"\1: 後に値が必要です"),
    (r"Option '(.+)' does not take a value\.", r"\1: 値は取りません"),
    (r"Got unexpected extra argument\(s\) \((.*)\)", r"余分な引数があります: \1"),
    (r"No such command '(.+)'\.", r"\1 というコマンドはありません"),
    (r"No such command '(.+)'\. Did you mean '(.+)'\?", r"\1 というコマンドはありません。\2 ではありませんか?"),
    (r"No such command '(.+)'\. \(Possible commands: (.+)\)", r"\1 というコマンドはありません。近い名前: \2"),
    (r"Missing command\.", r"コマンドが必要です"),
    (r"(.*: )Input should be a valid integer.*", r"\1整数が必要です"),
    (r"(.*: )Input should be a valid number.*", r"\1数が必要です"),
    (r"(.*: )Input should be greater than or equal to (.*)", r"\1\2 以上の数が必要です"),
    (r"(.*: )Input should be less than or equal to (.*)", r"\1\2 以下の数が必要です"),
    (r"(.*: )'(.*)' is not one of (.*)\.", r"\1\3 のどれかが必要ですが、\2 です"),
)
"""What the parser says of wrong options, as regular expressions, and the same in Japanese."""


def explain_usage(error: Any) -> str | None:
    """Returns what the parser says of wrong options in Japanese, with where and what to do; None for an error that only
    shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    text = error.format_message()
    for pattern, japanese in ERRORS:
        text = re.sub(f"^{pattern}$", japanese, text)
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "terakoya"
    return f"{path}: {text}{' ' if text.endswith('?') else '。'}`{path} --help` を見てください"
