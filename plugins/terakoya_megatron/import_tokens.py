"""Makes token stores from ids that other programs wrote, and the folder of the tokenizer that made the ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya_megatron.token_blocks import import_blocks
from terakoya_megatron.token_files import MegatronFiles
from terakoya_megatron.token_import import IdsOf, import_megatron
from terakoya_megatron.word_start_marks import word_start_table

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts


def make_store_from_megatron(
    prefix: Path,
    *,
    tokenizer: Path,
    out: Path,
    type: str | None = None,
    word_starts: bool = True,
    **options: Any,
) -> StoreFacts:
    """Makes the store `out` from `prefix`.bin and `prefix`.idx, with ids of the tokenizer in the folder `tokenizer` (of
    the registered `type`; recognised if None).

    `word_starts` rebuilds word starts if the tokenizer's pieces mark them. `options` are those of `import_megatron`:
    `repair`, `unit`, `eos`. Raises UserError as `import_megatron` and `recognise_tokenizer`.
    """
    MegatronFiles.open(prefix)  # first, since a tokenizer takes longer to open
    return import_megatron(prefix, out, _ids_of(tokenizer, type, word_starts), **options)


def make_store_from_blocks(
    sources: Sequence[Path | str],
    *,
    tokenizer: Path,
    out: Path,
    type: str | None = None,
    word_starts: bool = True,
) -> StoreFacts:
    """Makes the store `out` from files of `{"input_ids", "attention_mask"}` lines; the other arguments are as for
    `make_store_from_megatron`. Raises UserError as `import_blocks` and `recognise_tokenizer`."""
    return import_blocks(sources, out, _ids_of(tokenizer, type, word_starts))


def _ids_of(folder: Path, type: str | None, word_starts: bool) -> IdsOf:
    tokenizer = recognise_tokenizer(folder, type=type)
    return IdsOf(
        tokenizer.encoder(folder).vocabulary,
        folder,
        {f"tokenizer {name}": value for name, value in sorted(tokenizer.fingerprint(folder).items())},
        word_start_table(tokenizer, folder) if word_starts else None,
    )
