"""`terakoya tokenizer count`: counts the words of a corpus once, for all tokenizers that are trained on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from terakoya.commands.cleaning import CleanFolderOption, CleanOption
from terakoya.errors import UserError
from terakoya.process_pool import available_cores

if TYPE_CHECKING:
    from terakoya.corpus.cleaning_steps import StepsOrFile
    from terakoya.toolkit.tokenizers.word_counts import WordCounts

Documents = Literal["blank", "line"]


def count_words(
    sources: Sequence[Path | str],
    out: Path,
    *,
    settings: Mapping[str, Any],
    processes: int | None = None,
    documents: Documents = "blank",
    field: str = "text",
    clean: StepsOrFile | None = None,
    clean_folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WordCounts:
    """Counts the words of the files `sources`, split as the tokenizer of `settings` does, and writes the file `out`.

    All kinds and settings that split words in the same way can use the file, as their setting `counts`. `clean`,
    `clean_folder`: as for `terakoya.commands.tokenizer.app.train_tokenizer`; training must then use the same steps.

    Raises:
        UserError: wrong settings, a kind that does not learn from word counts, or an existing file `out`.
    """
    from terakoya.process_pool import warm_up

    processes = processes or available_cores()
    if processes > 1:
        warm_up(["terakoya.toolkit.tokenizers.word_counts"])

    from terakoya.corpus.cleaning_plan import clean_corpus
    from terakoya.corpus.cleaning_steps import load_steps
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.tokenization.train import make_tokenizer
    from terakoya.toolkit.tokenizers.word_counts_file import WordCountTokenizer, load_or_count_words, write_counts

    tokenizer = make_tokenizer(settings)
    if not isinstance(tokenizer, WordCountTokenizer):
        raise UserError(
            f"tokenizer type {settings['type']}: expected a kind that learns from word counts, such as mecab_wordpiece "
            "or byte_bpe; this one reads the corpus itself"
        )
    if out.exists():
        raise UserError(f"{out}: expected a new file, got an existing one; choose another --out")
    corpus = Corpus(find_files(sources), field=field, documents=documents, digests={})
    splitting = tokenizer.splitting()
    corpus = clean_corpus(corpus, load_steps(clean), clean_folder, out=out, processes=processes)
    sizes_and_times = corpus.sizes_and_times()
    table = load_or_count_words(corpus, splitting, processes=processes, progress=progress)
    if corpus.sizes_and_times() != sizes_and_times:
        raise UserError("corpus: a file was changed while it was read; leave the files alone and start again")
    write_counts(out, corpus, splitting, table)
    return table


def command(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders and addresses, as for `train`.")],
    out: Annotated[Path, typer.Option(help="The new file for the table.")],
    type: Annotated[str, typer.Option(help="A kind of tokenizer that learns from words.")],
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one for each CPU.", show_default=False)] = None,
    documents: Annotated[Documents, typer.Option(help="What separates documents in txt files.")] = "blank",
    field: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    clean: CleanOption = None,
    clean_folder: CleanFolderOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the kind; may be repeated.")
    ] = None,
) -> None:
    """Count words once. `tokenizer train --set counts=TABLE` then skips counting, for kinds that split words alike."""
    from terakoya.json_settings import apply_overrides
    from terakoya.log import console, progress_bar

    with progress_bar("count") as progress:
        table = count_words(
            corpus,
            out,
            settings={**apply_overrides({}, set_ or ()), "type": type},
            processes=processes,
            documents=documents,
            field=field,
            clean=clean,
            clean_folder=clean_folder,
            progress=progress,
        )
    console().print(
        f"{out}: {len(table.counts):,} distinct words of {table.words:,} in {table.documents:,} documents; "
        f"{sum(table.rejected.values()):,} documents rejected",
        soft_wrap=True,
        markup=False,
    )


def register(app: typer.Typer) -> None:
    """Adds `count` to the commands of `terakoya tokenizer`."""
    app.command("count")(command)
