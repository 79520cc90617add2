"""How wide the core is: what would make each new feature pay for all others. The numbers may fall, and are then written
down here; a change that lets one rise moves something out first, or gives the feature an object that others ask."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import terakoya

CORE = Path(terakoya.__file__).parent
SOURCES = {file: file.read_text(encoding="utf-8") for file in CORE.rglob("*.py")}

LINES = 37_542
LONG_SIGNATURES = 3
"""Functions with 8 parameters or more: the interface that Transformers has for attention."""
FILES_THAT_NAME = {
    "phases": (r"phase", 17),
    "addresses": (
        r"mirror|object.store|(?<!trust.)remote(?!.code)|an address|addresses such|address of a (run|copy|store)|"
        r"(and|or) addresses",
        7,
    ),
    "compile": (r"(?<!re\.)\bcompil", 24),
    "adapters": (r"adapter|lora", 14),
    "answers": (r"\"answers?\"|\.answers\b|answers: |(ends?|of) an answer|of answers", 10),
    "deepspeed": (r"deepspeed", 10),
    "word starts": (r"word_starts", 15),
    "mup": (r"\bmup\b|_mup\b", 8),
    "spikes": (r"spike|rollback", 19),
    "fp8": (r"fp8", 3),
}
"""Feature -> what names it, and the files of the core that do. More than 20 name one of them: compilation, of which
six mean a C compiler, and others say why a line stands as it does for torch's."""


def test_the_core_does_not_grow() -> None:
    assert sum(len(text.splitlines()) for text in SOURCES.values()) <= LINES


def test_functions_do_not_get_more_parameters() -> None:
    trees = [ast.parse(text) for text in SOURCES.values()]
    functions = [node.args for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [[each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs)] for of in functions]
    assert sum(len(set(each) - {"self", "cls"}) >= 8 for each in names) <= LONG_SIGNATURES


@pytest.mark.parametrize("feature", FILES_THAT_NAME)
def test_a_feature_is_not_named_in_more_files(feature: str) -> None:
    expression, count = FILES_THAT_NAME[feature]
    files = [file for file, text in SOURCES.items() if re.search(expression, text, re.IGNORECASE)]
    assert len(files) <= count, "let the others ask one object"
