"""Runs that start from models with another vocabulary, or from smaller ones that grow; `tokenizer extend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from terakoya.components import StartModel


@hookimpl
def register_commands() -> Mapping[str, Command]:
    """Adds `tokenizer extend`."""
    from terakoya_growth.commands import extend

    example = "terakoya tokenizer extend work/model --corpus corpus.jsonl.gz --add 1000 --out work/extended"
    return {"tokenizer extend": Command(extend.command, example, after="tokenizer train")}


@hookimpl
def register_initial_weights() -> Mapping[str, Callable[[StartModel], tuple[PreTrainedModel, str]]]:
    """Implements `hookspecs.register_initial_weights`."""
    return {"vocabulary": _give_vocabulary, "grow": _grow}


def _give_vocabulary(start: StartModel) -> tuple[PreTrainedModel, str]:
    from terakoya_growth.new_vocabulary import plan_rows, replace_rows

    rows, note = plan_rows(start)
    replace_rows(start.source, rows)
    return start.source, note


def _grow(start: StartModel) -> tuple[PreTrainedModel, str]:
    from terakoya.training.model.module_parts import architecture_of
    from terakoya_growth.growth import grow

    architecture = architecture_of(start.target, start.architectures, start.vocabulary, key="start_from.grow")
    return grow(start.source, start.target, start.settings.ways_to_grow, architecture, seed=start.seed)
