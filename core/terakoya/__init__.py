"""terakoya trains language models from raw text, Japanese first: tokenizer, token store, pre-training, export.

Each command has a function of the same name here, which is imported when it is first used:
`terakoya.train_tokenizer`, `terakoya.prepare`, `terakoya.estimate`, `terakoya.train`, `terakoya.evaluate`,
`terakoya.export`, `terakoya.finetune`, `terakoya.import_checkpoint`, `terakoya.fill_mask`, `terakoya.find_replaced`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from terakoya import places
from terakoya.version import __version__ as __version__

# read once, at a program's first product on a GPU, which may come before a run asks for deterministic algorithms
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if TYPE_CHECKING:
    from terakoya.conversion.export import export as export
    from terakoya.conversion.import_checkpoint import import_checkpoint as import_checkpoint
    from terakoya.hookspecs import Command as Command
    from terakoya.hookspecs import Group as Group
    from terakoya.hookspecs import Language as Language
    from terakoya.hookspecs import hookimpl as hookimpl
    from terakoya.launch.here import train as train
    from terakoya.preparation.prepare import prepare as prepare
    from terakoya.tokenization.train import train_tokenizer as train_tokenizer

_FUNCTIONS = {
    "Command": "terakoya.hookspecs",
    "Group": "terakoya.hookspecs",
    "Language": "terakoya.hookspecs",
    "hookimpl": "terakoya.hookspecs",
    "train_tokenizer": "terakoya.tokenization.train",
    "prepare": "terakoya.preparation.prepare",
    "train": "terakoya.launch.here",
    "export": "terakoya.conversion.export",
    "import_checkpoint": "terakoya.conversion.import_checkpoint",
}


places.registered = lambda: import_module("terakoya.plugins.verbs").find_places()


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    if not name.startswith("_"):
        from terakoya.plugins.families import function_of_family

        return function_of_family(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
