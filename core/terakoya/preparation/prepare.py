"""From options to a token store: `terakoya.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.atomic_files import check_writable
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.places import as_fields, check_local
from terakoya.plugins import registry
from terakoya.preparation.options import PrepareOptions
from terakoya.process_pool import warm_up
from terakoya.tokenization.recognise import recognise_tokenizer

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.components.record_format import RecordFormat
    from terakoya.corpus.files import Source
    from terakoya.preparation.job import PrepareJob
    from terakoya.preparation.local import Progress
    from terakoya.store.token_store import StoreFacts


def prepare(
    sources: Sequence[Source | str] | Path | str, *, progress: Progress | None = None, **options: Any
) -> StoreFacts:
    """Encodes `sources` into a token store and returns its facts. `options` are the other fields of `PrepareOptions`,
    of which `tokenizer` and `out` are required; `progress` is as for `prepare_locally`. Raises UserError for anything
    that the user can correct."""
    files = [sources] if isinstance(sources, Path | str) else sources
    return prepare_store(PrepareOptions(sources=files, **as_fields(PrepareOptions, options)), progress=progress)


def prepare_store(options: PrepareOptions, *, progress: Progress | None = None) -> StoreFacts:
    """Makes the store that `options` describe in processes of this machine; as `prepare`."""
    if options.process_count > 1:
        warm_up(["terakoya.preparation.encoding"])

    from terakoya.preparation.local import prepare_locally

    return prepare_locally(create_job(options), progress=progress)


def create_job(options: PrepareOptions) -> PrepareJob:
    """Reads the whole corpus, for its hash and for the plan of its cleaning, and returns the job of `options`. Raises
    UserError for missing files, wrong settings, and options that do not go together."""
    from terakoya.corpus.beginnings import warn_of_one_document
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files
    from terakoya.plugins.cleaning import clean_corpus, read_cleaning
    from terakoya.preparation.job import PrepareJob
    from terakoya.preparation.word_borders import find_word_finder

    check_local(options.out, "the new store's folder")
    check_writable(options.out)
    options = replace(options, tokenizer=_find_tokenizer(options.tokenizer))
    make_records = _find_record_format(options)
    if options.clean is not None and make_records is None:  # wrong steps are found before files are read
        read_cleaning(options.clean)
    words = None if options.words is None else find_word_finder(options.words)
    corpus = Corpus(
        find_files(options.sources),
        field=options.field,
        documents=options.documents,
        max_document_bytes=options.max_document_bytes,
        encoding=options.encoding,
        max_rejects=options.max_rejects,
    )
    if not options.held_out:
        warn_of_one_document(corpus)
    tokenizer = recognise_tokenizer(options.tokenizer, type=options.type)
    records = None if make_records is None else make_records(options, tokenizer)
    corpus = clean_corpus(
        corpus if records is None else replace(corpus, records=records),
        options.clean,
        options.clean_folder,
        out=options.out,
        processes=options.process_count,
        held_out=options.held_out,
    )
    if options.special_tokens_in_text is not None:
        tokenizer = tokenizer.model_copy(update={"special_tokens_in_text": options.special_tokens_in_text})
    return PrepareJob.create(options, corpus, tokenizer, records, words)


def _find_tokenizer(folder: Path) -> Path:
    """`folder`, or the local snapshot of the Hugging Face Hub's repository of that name. UserError if there is neither
    and `folder` may be such a name."""
    from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name

    name = str(folder)
    if folder.exists() or not is_hub_name(name):
        return folder
    snapshot = find_snapshot(name)
    if snapshot is None:
        raise UserError(
            f"{name}: expected a tokenizer's folder, got {describe_found(folder, 'tokenizer')}; make one with "
            "`terakoya tokenizer train`. If it is a name on the Hugging Face Hub: nothing is downloaded here; fetch it "
            f"first: hf download {name}"
        )
    return snapshot


def _find_record_format(options: PrepareOptions) -> Callable[[PrepareOptions, Tokenizer], RecordFormat] | None:
    """What makes the format in which lines of jsonl are read, None for texts. Raises UserError for a template without
    conversations, and where no plugin reads them."""
    if options.conversations:
        return registry().record_format("conversations")
    if options.template is not None:
        raise UserError(f"--template {options.template}: is for conversations; add --conversations, or leave it out")
    return None
