"""`terakoya store export-blocks` and `import-blocks`: fixed blocks of ids as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def import_command(
    files: Annotated[list[str], typer.Argument(help="Files of JSON lines (.gz, .zst ... too), or folders of them.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer that made the ids.")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    type: Annotated[
        str | None, typer.Option(help="The tokenizer's type. Default: recognised.", show_default=False)
    ] = None,
    word_starts: Annotated[bool, typer.Option(help="Rebuild word starts if the tokenizer's pieces mark them.")] = True,
) -> None:
    """Make a store from blocks of ids: each becomes a document, without its padding."""
    from terakoya.log import console
    from terakoya_megatron.token_blocks import import_blocks
    from terakoya_megatron.token_import import IdsOf

    facts = import_blocks(files, out, IdsOf.find(tokenizer, type, word_starts=word_starts))
    console().print(
        f"{out}: {facts.documents:,} blocks, {facts.tokens:,} tokens; word starts "
        f"{'rebuilt from the pieces' if facts.word_starts else 'not known'}",
        soft_wrap=True,
        markup=False,
    )
    next_command.after_store(out, facts)


def export_command(
    store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")],
    out: Annotated[Path, typer.Option(help="The new file, such as train/blocks.jsonl or blocks.jsonl.gz.")],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 2048,
    keep_short: Annotated[bool, typer.Option("--keep-short", help="Keep the last, short block.")] = False,
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Shuffle the blocks with this seed. Default: in order.", show_default=False)
    ] = None,
) -> None:
    """Write a store as blocks of ids, {"input_ids": [...], "attention_mask": [...]}."""
    from terakoya.log import console
    from terakoya_megatron.token_blocks import export_blocks

    done = export_blocks(store, out, block_size=block_size, keep_short=keep_short, shuffle_seed=shuffle_seed)
    rest = f"; the last {done.short:,} tokens were {'dropped' if done.dropped else 'kept'}" if done.short else ""
    console().print(f"{out}: {done.blocks:,} blocks of {block_size:,} tokens{rest}", soft_wrap=True, markup=False)
    words = ("--tokenizer", store / "tokenizer", "--out", store.with_name(f"{store.name}.blocks"))
    next_command.show("store", "import-blocks", out, *words)
