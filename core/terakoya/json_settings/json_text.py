"""JSON text as people write it: comments, commas after last entries, and a place and advice for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.json_settings.short_json import given_twice
from terakoya.json_settings.yaml_text import looks_like_yaml

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.S)
_LAST_COMMAS = re.compile(rf"({_STRING}|[\w}}\]])(\s*),(?=\s*[}}\]])|{_STRING}")


def strict_json(text: str) -> str:
    """Returns `text` with spaces for its comments and for commas after last entries, so that every place stays."""
    text = _COMMENTS.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
    return _LAST_COMMAS.sub(lambda found: f"{found[1]}{found[2]} " if found[1] else found[0], text)


def parse_json(path: Path, original: str, text: str | None = None) -> Any:
    """Returns the value of the JSON `text`, which has every character at its place in the `original`."""
    text = original if text is None else text

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(given_twice(f"{path}{_place(text, _second(text, key))}", key, seen[key], value))
            seen[key] = value
        return seen

    def refuse_constant(name: str) -> Any:
        at = next(found.start() for found in re.finditer(rf"{name}|{_STRING}", text) if found[0] == name)
        raise UserError(f"{path}{_place(text, at)}: expected a number, got {name}")

    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}{explain_syntax(path, original, error)}") from None
    except ValueError:  # Python's bound on the digits of an integer
        found = re.search(r"\d{4300,}", text)
        place = _place(text, found.start()) if found else ""
        raise UserError(f"{path}{place}: expected a number that fits into 64 bits, got a longer one") from None
    except RecursionError:
        raise UserError(f"{path}: its lists and objects are nested too deep") from None


def _second(text: str, key: str) -> int:
    """Returns the position at which an object of the JSON `text` names `key` for the second time."""
    open_objects: list[set[str]] = []
    for found in re.finditer(rf"({_STRING})(\s*:)?|[\[{{}}\]]", text):
        if found[0] in ("{", "["):
            open_objects.append(set())
        elif found[0] in ("}", "]"):
            open_objects.pop()
        elif found[2]:
            name = json.loads(found[1])
            if name == key and name in open_objects[-1]:
                return found.start()
            open_objects[-1].add(name)
    return 0


def _place(text: str, at: int) -> str:
    return f":{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def explain_syntax(path: Path, text: str, error: json.JSONDecodeError) -> str:
    """Returns where `text`, the content of `path`, is not JSON, what is there, and what to write instead."""
    if not text.strip():
        return ": is empty; expected a JSON object"
    if looks_like_yaml(text):
        return f": is YAML; give it a name that ends in .yaml, such as {path.with_suffix('.yaml').name}"
    at = error.pos + error.msg.startswith("Illegal trailing comma")  # Python from 3.13 on points at the comma itself
    before, after = text[:at].rstrip(), text[at:].lstrip()
    if error.msg == "Extra data" and "\n" not in before.lstrip() and after.startswith(("{", "[")):
        inside = path.with_name("parameters.json")
        return (
            ": holds a JSON value in each line, as a corpus and a run's metrics.jsonl do; expected one JSON object, "
            "{...}" + (f"; did you mean {inside}?" if inside.is_file() else "")
        )
    if not after:
        advice = "the file ends too early; a bracket or a quote is not closed"
    elif after[:1] in ("}", "]") and before.endswith(","):
        at, advice = len(before) - 1, f"a comma before the closing {after[0]}; remove the comma"
    elif after.startswith(",") and before.endswith((",", "{", "[")):
        advice = "a comma with nothing before it; remove it"
    elif after.startswith("/*"):
        advice = "a comment that is not closed; add */"
    elif after.startswith("//"):
        advice = "a comment, which this file cannot have; remove it"
    elif after.startswith("#"):
        advice = "a comment; write // before a comment in JSON, or give the file a name that ends in .yaml"
    elif "," in error.msg and "Expecting" in error.msg:
        at, advice = len(before), f"expected a comma before {_excerpt(after)}; add it here"
    elif after.startswith("'"):
        advice = f'{_excerpt(after)}: JSON has "double quotes" round names and texts'
    elif word := re.match("|".join(_PYTHON_WORDS), after):
        advice = f"{word[0]}: JSON writes {_PYTHON_WORDS[word[0]]}"
    elif error.msg == "Extra data":
        advice = f"{_excerpt(after)} after the end of the JSON value; remove it, or a bracket that closes too early"
    elif error.msg.startswith("Unterminated string"):
        advice = f"{_excerpt(after)}: the quote is not closed in its line; add the closing one"
    else:
        advice = f"{error.msg}, got {_excerpt(after)}"
    return f"{_place(text, at)}: not valid JSON: {advice}"


def _excerpt(text: str) -> str:
    line = text.partition("\n")[0].strip()
    return line if len(line) <= 30 else line[:27] + "..."
