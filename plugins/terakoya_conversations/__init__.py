"""What this family adds: conversations as documents of a store, and the objective that learns their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components import Objective, Tokenizer
    from terakoya.components.record_format import RecordFormat
    from terakoya.preparation.options import PrepareOptions


@hookimpl
def register_record_formats() -> Mapping[str, Callable[[PrepareOptions, Tokenizer], RecordFormat]]:
    """Implements `terakoya.hookspecs.register_record_formats`."""
    return {"conversations": _read_conversations}


@hookimpl
def register_objectives() -> Mapping[str, type[Objective]]:
    """Registers `instruction`."""
    from terakoya_conversations.instruction import Instruction

    return {"instruction": Instruction}


def _read_conversations(options: PrepareOptions, tokenizer: Tokenizer) -> RecordFormat:
    from terakoya_conversations.format import read_conversations

    return read_conversations(options, tokenizer)
