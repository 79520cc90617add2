"""Makes token stores from ids that other programs wrote, and the folder of the tokenizer that made the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from terakoya.preparation.word_start_marks import word_start_table
from terakoya.store.megatron_files import MegatronFiles
from terakoya.store.megatron_import import import_megatron
from terakoya.store.token_blocks import import_blocks
from terakoya.tokenization.recognise import recognise_tokenizer

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts, Unit


def make_store_from_megatron(
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

    `word_starts` rebuilds word starts if the tokenizer's pieces mark them. The other arguments are as for
    `import_megatron`. Raises UserError as `import_megatron` and `recognise_tokenizer`.
    """
    MegatronFiles.open(prefix)  # first, since a tokenizer takes longer to open
    return import_megatron(
        prefix, out, repair=repair, unit=unit, eos=eos, **_tokenizer_arguments(tokenizer, type, word_starts)
    )


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
    return import_blocks(sources, out, **_tokenizer_arguments(tokenizer, type, word_starts))


def _tokenizer_arguments(folder: Path, type: str | None, word_starts: bool) -> Mapping[str, Any]:
    """Returns what `import_megatron` and `import_blocks` need to know about the tokenizer in `folder`."""
    tokenizer = recognise_tokenizer(folder, type=type)
    return {
        "vocabulary": tokenizer.encoder(folder).vocabulary,
        "tokenizer_folder": folder,
        "fingerprints": {f"tokenizer {name}": value for name, value in sorted(tokenizer.fingerprint(folder).items())},
        "starts_word": word_start_table(tokenizer, folder) if word_starts else None,
    }
