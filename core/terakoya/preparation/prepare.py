"""From files and options to a token store: `terakoya.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from terakoya.errors import UserError
from terakoya.preparation import conversation_options
from terakoya.process_pool import cores
from terakoya.tokenization.recognise import recognise_tokenizer

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.corpus.cleaning_steps import StepsOrFile
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import RemoteFile
    from terakoya.preparation.chat_template import ChatTemplate
    from terakoya.store.token_store import StoreFacts


Documents = Literal["blank", "line"]


Unit = Literal["document", "line"]


Specials = Literal["parse", "split", "reject"]


def prepare(
    sources: Sequence[Path | str | RemoteFile],
    *,
    tokenizer: Path,
    out: Path,
    type: str | None = None,
    processes: int | None = None,
    documents: Documents = "blank",
    field: str = "text",
    unit: Unit = "document",
    append_eos: bool = False,
    max_rejects: int | float = 0.01,
    special_tokens_in_text: Specials | None = None,
    max_document_bytes: int = 100_000_000,
    clean: StepsOrFile | None = None,
    clean_folder: Path | None = None,
    held_out: bool = False,
    shard: str | None = None,
    force: bool = False,
    conversations: bool = False,
    template: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoreFacts:
    """Encodes `sources` with the tokenizer in the folder `tokenizer` into the token store `out`.

    A source is a file, a folder, a pattern such as `text/*.parquet`, or an address such as `s3://bucket/wiki`.
    `clean`: cleaning steps, or a JSON file with a list of them; which documents they drop is noted in `clean_folder`,
    by default `OUT.clean` beside the store. `held_out`: takes the documents that the step `hold_out` sets aside,
    instead of the others. `shard`: `3/16` encodes that share of the corpus only. `conversations`: the files hold
    conversations, to be written as `template` says, which is `chat` (the tokenizer's own), `alpaca`, `alpaca_en` or a
    Jinja file; by default the tokenizer's own if it has one, else `alpaca`.

    Raises UserError for anything the user can mend; see `terakoya.preparation.local.prepare`.
    """
    from terakoya.process_pool import warm_up

    processes = processes or cores()
    if processes > 1:
        warm_up(["terakoya.preparation.encoding"])

    from terakoya.preparation.local import prepare as prepare_corpus
    from terakoya.preparation.sharding import Shard

    tokenizer = conversation_options.tokenizer_folder(tokenizer)
    corpus, component, found = opened(
        sources,
        tokenizer=tokenizer,
        out=out,
        type=type,
        processes=processes,
        documents=documents,
        field=field,
        special_tokens_in_text=special_tokens_in_text,
        max_document_bytes=max_document_bytes,
        clean=clean,
        clean_folder=clean_folder,
        held_out=held_out,
        conversations=conversations,
        template=template,
    )
    return prepare_corpus(
        corpus,
        component,
        tokenizer,
        out,
        unit=unit,
        append_eos=append_eos,
        processes=processes,
        max_rejects=max_rejects,
        force=force,
        shard=Shard.parse(shard) if shard is not None else None,
        template=found,
        progress=progress,
    )


def opened(
    sources: Sequence[Path | str | RemoteFile],
    *,
    tokenizer: Path,
    out: Path,
    type: str | None,
    processes: int,
    documents: Documents,
    field: str,
    special_tokens_in_text: Specials | None,
    max_document_bytes: int,
    clean: StepsOrFile | None,
    clean_folder: Path | None,
    held_out: bool,
    conversations: bool,
    template: str | None,
) -> tuple[Corpus, Tokenizer, ChatTemplate | None]:
    """The corpus, with the plan of its cleaning made, the tokenizer, and the template of conversations that the
    arguments of `prepare` mean."""
    from terakoya.corpus.cleaning_plan import clean_corpus
    from terakoya.corpus.cleaning_steps import load_steps
    from terakoya.corpus.corpus import Corpus
    from terakoya.corpus.files import find_files

    if conversations:
        conversation_options.check(cleaning=clean is not None, held_out=held_out)
    steps = load_steps(clean)
    corpus = Corpus(
        find_files(sources),
        field=field,
        documents=documents,
        max_document_bytes=max_document_bytes,
        conversations=conversations,
    )
    component = recognise_tokenizer(tokenizer, type=type)
    found = conversation_options.template_of(component, tokenizer, template, conversations=conversations)
    corpus = clean_corpus(corpus, steps, clean_folder, out=out, processes=processes, held_out=held_out)
    if special_tokens_in_text is not None:
        component = component.model_copy(update={"special_tokens_in_text": special_tokens_in_text})
    return corpus, component, found


def parse_max_rejects(text: str) -> int | float:
    """A count ("100") or a share ("0.01", "1%") of rejected documents. UserError for anything else."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise UserError(f'--max-rejects: expected a count such as 100 or a share such as 0.01 or 1%, got "{text}"')
    return value
