"""Counts the words of a corpus once, for all tokenizers that are trained on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from terakoya.atomic_files import check_writable
from terakoya.errors import UserError
from terakoya.places import check_local
from terakoya.process_pool import available_cores, warm_up
from terakoya.tokenization.train import make_tokenizer

if TYPE_CHECKING:
    from terakoya.corpus.cleaning import StepsOrFile
    from terakoya.corpus.corpus import Reading
    from terakoya.corpus.files import Source
    from terakoya.toolkit.tokenizers.word_counts import WordCounts


def save_word_counts(
    sources: Sequence[Source | str],
    out: Path,
    *,
    settings: Mapping[str, Any],
    processes: int | None = None,
    clean: StepsOrFile | None = None,
    clean_folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    **reading: Unpack[Reading],
) -> WordCounts:
    """Counts the words of the files `sources`, split as the tokenizer of `settings` does, and writes the file `out`.

    All kinds and settings that split words in the same way can use the file, as their setting `counts`. The other
    arguments are as for `train_tokenizer`; training must then use the same cleaning steps. Raises UserError for wrong
    settings, a kind that does not learn from word counts, an existing file `out`, or a corpus file that is changed
    while it is read; and as `Corpus` and `clean_corpus` do.
    """
    out, processes = Path(out), processes or available_cores()
    check_writable(out.parent)
    if processes > 1:
        warm_up(["terakoya.toolkit.tokenizers.word_counts"])

    from terakoya.corpus.beginnings import check_beginnings
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.plugins.cleaning import clean_corpus
    from terakoya.toolkit.tokenizers.word_counts_file import WordCountTokenizer, load_or_count_words, write_counts

    tokenizer = make_tokenizer(settings)
    if not isinstance(tokenizer, WordCountTokenizer):
        raise UserError(
            f"tokenizer type {settings['type']}: expected a kind that learns from word counts, such as mecab_wordpiece "
            "or byte_bpe; this one reads the corpus itself"
        )
    check_local(out, "a new file")
    if out.exists():
        raise UserError(f"{out}: expected a new file, got an existing one; choose another --out")
    corpus = Corpus(find_files(sources), **reading, digests={})
    check_beginnings(corpus)
    splitting = tokenizer.splitting()
    corpus = clean_corpus(corpus, clean, clean_folder, out=out, processes=processes)
    sizes_and_times = corpus.sizes_and_times()
    table = load_or_count_words(corpus, splitting, processes=processes, progress=progress)
    if corpus.sizes_and_times() != sizes_and_times:
        raise UserError("corpus: a file was changed while it was read; leave the files alone and start again")
    write_counts(out, corpus, splitting, table)
    return table
