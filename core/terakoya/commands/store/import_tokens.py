"""`terakoya store import` makes a store from Megatron's token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts

Unit = Literal["document", "line"]


def import_megatron(
    prefix: Path,
    *,
    tokenizer: Path,
    out: Path,
    type: str | None = None,
    repair: bool = False,
    unit: Unit | None = None,
    eos: int | Literal["find"] | None = "find",
    word_starts: bool = True,
) -> StoreFacts:
    """Makes the store `out` from `prefix`.bin and `prefix`.idx, with ids of the tokenizer in the folder `tokenizer` (of
    the registered `type`; recognised if None).

    `word_starts` rebuilds word starts if the tokenizer's pieces mark them. Raises UserError as
    `terakoya.store.megatron_import.import_megatron`.
    """
    from terakoya.store.megatron_files import MegatronFiles
    from terakoya.store.megatron_import import import_megatron as import_files
    from terakoya.tokenization.recognise import recognise_tokenizer
    from terakoya.toolkit.tokenizers.word_start_marks import word_start_table

    MegatronFiles.open(prefix)  # first, since a tokenizer takes longer to open
    component = recognise_tokenizer(tokenizer, type=type)
    return import_files(
        prefix,
        out,
        vocabulary=component.encoder(tokenizer).vocabulary,
        tokenizer_folder=tokenizer,
        fingerprints={f"tokenizer {name}": value for name, value in sorted(component.fingerprint(tokenizer).items())},
        repair=repair,
        unit=unit,
        eos=eos,
        starts_word=word_start_table(component, tokenizer) if word_starts else None,
    )


def parse_eos(text: str) -> int | Literal["find"] | None:
    """Parses an id, "find" or "none". Raises UserError for anything else."""
    if text == "find":
        return "find"
    if text == "none":
        return None
    if text.isdecimal():
        return int(text)
    raise UserError(f'--eos: expected an id, "find" or "none", got "{text}"')


def command(
    prefix: Annotated[Path, typer.Argument(help="The files are PREFIX.bin and PREFIX.idx.", metavar="PREFIX")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made the ids.")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    type: Annotated[
        str | None, typer.Option(help="The tokenizer's type. Default: recognised.", show_default=False)
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair an index that omits the ends of documents.")] = False,
    unit: Annotated[
        Unit | None,
        typer.Option(help="What one sequence becomes. Default: line if documents are split.", show_default=False),
    ] = None,
    eos: Annotated[str, typer.Option(metavar="ID|find|none", help="The id that ends every document.")] = "find",
    word_starts: Annotated[bool, typer.Option(help="Rebuild word starts if the tokenizer's pieces mark them.")] = True,
) -> None:
    """Make a store from token files of Megatron-LM, Megatron-DeepSpeed or GPT-NeoX."""
    from terakoya.log import console

    facts = import_megatron(
        prefix,
        tokenizer=tokenizer,
        out=out,
        type=type,
        repair=repair,
        unit=unit,
        eos=parse_eos(eos),
        word_starts=word_starts,
    )
    console().print(
        f"{out}: {facts.documents:,} documents, {facts.sequences:,} sequences, {facts.tokens:,} tokens; "
        f"end of document {'not stored' if facts.eos is None else facts.eos}, word starts "
        f"{'rebuilt from the pieces' if facts.word_starts else 'not known'}",
        soft_wrap=True,
        markup=False,
    )
