"""`--model-type` of `train` and `parameters show`: an entry of a parameter.json of language-pretraining."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from terakoya.errors import UserError

ModelType = Annotated[str | None, typer.Option(help="An entry of retarfi/language-pretraining's parameter.json.")]
Data = Annotated[list[Path] | None, typer.Option(help="With --model-type: the store(s) to train on.")]
Validation = Annotated[list[Path] | None, typer.Option(help="With --model-type: held-out store(s).")]
WholeWordMask = Annotated[
    bool, typer.Option("--do_whole_word_mask", "--do-whole-word-mask", help="With --model-type: mask whole words.")
]
Fp16Type = Annotated[
    int | None,
    typer.Option("--fp16_type", "--fp16-type", help="With --model-type: language-pretraining's --fp16_type."),
]


def train(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    model_type: ModelType = None,
    data: Data = None,
    validation: Validation = None,
    whole_word_mask: WholeWordMask = False,
    fp16_type: Fp16Type = None,
) -> None:
    """Trains as the entry says, if one is named."""
    options = arguments["options"]
    if model_type is None:
        if data or validation or whole_word_mask or fp16_type is not None:
            raise UserError(
                "--data, --validation, --do_whole_word_mask and --fp16_type are options of --model-type; "
                "without it the parameter file sets them"
            )
    else:
        if not data:
            raise UserError("--model-type: a language-pretraining parameter.json names no data; add --data STORE")
        from terakoya_language_pretraining.entries import ChosenEntry, read_entry

        chosen = ChosenEntry(
            model_type, data, validation or (), whole_word_mask, fp16_type, processes_per_node=options.processes or 1
        )
        options = replace(options, read=functools.partial(read_entry, chosen=chosen))
    verb(**{**arguments, "options": options})


def show(
    verb: Callable[..., None], arguments: Mapping[str, Any], *, model_type: ModelType = None, data: Data = None
) -> None:
    """Shows what the entry becomes, if one is named."""
    options = arguments["options"]
    if model_type is not None:
        from terakoya_language_pretraining.entries import ChosenEntry, read_entry

        stores = data or [Path("STORE")]
        options = replace(
            options,
            read=functools.partial(read_entry, chosen=ChosenEntry(model_type, stores)),
            further=["--model-type", model_type, *(word for store in stores for word in ("--data", str(store)))],
        )
    elif data:
        raise UserError("--data is an option of --model-type; without it the parameter file sets it")
    verb(**{**arguments, "options": options})
