"""`terakoya store import` makes a store from Megatron's token files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

Unit = Literal["document", "line"]


def parse_eos(text: str) -> int | Literal["find"] | None:
    """Parses an id, "find" or "none". Raises UserError for anything else."""
    if text == "find":
        return "find"
    if text == "none":
        return None
    if text.isdecimal():
        return int(text)
    raise UserError(f'--eos: expected an id, "find" or "none", got "{text}"')


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `store import`."""

    prefix: Annotated[Path, typer.Argument(help="The files are PREFIX.bin and PREFIX.idx.", metavar="PREFIX")]
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made the ids.")]
    out: Annotated[Path, typer.Option(help="The new store's folder.")]
    type: Annotated[str | None, typer.Option(help="The tokenizer's type. Default: recognised.", show_default=False)] = (
        None
    )
    repair: Annotated[bool, typer.Option("--repair", help="Repair an index that omits the ends of documents.")] = False
    unit: Annotated[
        Unit | None,
        typer.Option(help="What one sequence becomes. Default: line if documents are split.", show_default=False),
    ] = None
    eos: Annotated[
        int | Literal["find"] | None,
        typer.Option(metavar="ID|find|none", help="The id that ends every document.", parser=parse_eos),
    ] = "find"
    word_starts: Annotated[bool, typer.Option(help="Rebuild word starts if the tokenizer's pieces mark them.")] = True


def command(options: Options) -> None:
    """Make a store from token files of Megatron-LM, Megatron-DeepSpeed or GPT-NeoX."""
    from terakoya.log import console, plural
    from terakoya_megatron.token_files import MegatronFiles
    from terakoya_megatron.token_import import IdsOf, import_megatron

    MegatronFiles.open(options.prefix)  # first, since a tokenizer takes longer to open
    ids_of = IdsOf.find(options.tokenizer, options.type, word_starts=options.word_starts)
    facts = import_megatron(
        options.prefix, options.out, ids_of, repair=options.repair, unit=options.unit, eos=options.eos
    )
    console().print(
        f"{options.out}: {facts.documents:,} document{plural(facts.documents)}, "
        f"{facts.sequences:,} sequence{plural(facts.sequences)}, {facts.tokens:,} tokens; "
        f"end of document {'not stored' if facts.eos is None else facts.eos}, word starts "
        f"{'rebuilt from the pieces' if facts.word_starts else 'not known'}",
        soft_wrap=True,
        markup=False,
    )
    next_command.after_store(options.out, facts)
