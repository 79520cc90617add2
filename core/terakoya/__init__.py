"""terakoya trains language models from raw text, Japanese first: tokenizer, token store, pre-training, export.

What the command line does is a function of the same name here, imported when it is first used:
`terakoya.train_tokenizer`, `terakoya.prepare`, `terakoya.estimate`, `terakoya.train`, `terakoya.evaluate`,
`terakoya.export`, `terakoya.import_checkpoint`, `terakoya.fill_mask`, `terakoya.find_replaced`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from terakoya.commands.prepare import prepare as prepare
    from terakoya.commands.train import train as train
    from terakoya.commands.try_model import fill_mask as fill_mask
    from terakoya.commands.try_model import find_replaced as find_replaced
    from terakoya.conversion.export import export as export
    from terakoya.conversion.import_checkpoint import import_checkpoint as import_checkpoint
    from terakoya.estimation.estimate import estimate as estimate
    from terakoya.evaluation.evaluate import evaluate as evaluate
    from terakoya.tokenization.train import train_tokenizer as train_tokenizer

__version__ = "0.1.0"

hookimpl = pluggy.HookimplMarker("terakoya")
"""Marks a plugin's functions as hooks; every hook is described in `terakoya.hookspecs`."""

_FUNCTIONS = {
    "train_tokenizer": "terakoya.tokenization.train",
    "prepare": "terakoya.commands.prepare",
    "estimate": "terakoya.estimation.estimate",
    "train": "terakoya.commands.train",
    "evaluate": "terakoya.evaluation.evaluate",
    "export": "terakoya.conversion.export",
    "import_checkpoint": "terakoya.conversion.import_checkpoint",
    "fill_mask": "terakoya.commands.try_model",
    "find_replaced": "terakoya.commands.try_model",
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
