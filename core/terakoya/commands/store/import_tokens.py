"""`terakoya store import`: Megatron's token files become a store."""

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
    """Makes the store `out` of `prefix`.bin and `prefix`.idx, whose ids are those of the tokenizer in the folder
    `tokenizer` (of the kind `type`; recognised if None).

    `word_starts` rebuilds word starts where the tokenizer's pieces tell them. Raises UserError for anything the user
    can mend; see `terakoya.store.megatron_import`.
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
    """An id, "find" or "none". UserError for anything else."""
    if text == "find":
        return "find"
    if text == "none":
        return None
    if text.isdecimal():
        return int(text)
    raise UserError(f'--eos: expected an id, "find" or "none", got "{text}"')


def command(
    prefix: Annotated[Path, typer.Argument(help="The files are PREFIX.bin and PREFIX.idx.", metavar="PREFIX")],
    tokenizer: Annotated[Path, typer.Option(help="The folder of the tokenizer that the ids come from.")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    type: Annotated[
        str | None, typer.Option(help="The tokenizer's kind. Default: recognised.", show_default=False)
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend an index that leaves out the ends of documents.")
    ] = False,
    unit: Annotated[
        Unit | None,
        typer.Option(help="What a sequence becomes. Default: line where documents are split.", show_default=False),
    ] = None,
    eos: Annotated[str, typer.Option(metavar="ID|find|none", help="The id that ends every document.")] = "find",
    word_starts: Annotated[
        bool, typer.Option(help="Rebuild word starts where the tokenizer's pieces tell them.")
    ] = True,
) -> None:
    """Make a store of token files by Megatron-LM, Megatron-DeepSpeed or GPT-NeoX."""
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
