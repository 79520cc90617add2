"""Compares the vocabulary of a folder that a run starts from with the vocabulary of the token stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.components.tokenizer import load_tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.tokenizer_identity import SHOWN, different_ids, quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "vocab.json", "tokenizer_config.json")
"""Tokenizer files; a folder with a tokenizer has at least one of them."""


def vocabulary_problems(
    folder: Path, config: PretrainedConfig, vocabulary: Vocabulary, tokenizer_folder: Path
) -> list[str]:
    """Returns the differences between the vocabulary of `folder` and the stores', one line each.

    Compares sizes and, if `folder` holds a tokenizer, every token's id with the tokenizer in `tokenizer_folder`. Where
    the ids are the same, the folder's model may have more embeddings than there are ids: they are padding, as T5's.
    """
    problems = []
    if config.vocab_size != vocabulary.size:
        problems.append(
            f"its vocabulary has {config.vocab_size:,} entries, the stores' {vocabulary.size:,}; prepare the stores "
            "with the folder's tokenizer, or set start_from.vocabulary"
        )
    files = [name for name in FILES if (folder / name).is_file()]
    if not files:
        return problems
    is_padded = config.vocab_size > vocabulary.size
    if _same_files(folder, tokenizer_folder):
        return [] if is_padded else problems
    try:
        theirs, ours = _token_ids(folder, config), _token_ids(tokenizer_folder)
    except UserError as error:
        problems.append(f"its tokenizer ({files[0]}) cannot be compared with the stores': {error}")
        return problems
    if theirs != ours:
        problems.append(_difference(theirs, ours))
    return [] if is_padded and theirs == ours else problems


def _same_files(folder: Path, other: Path) -> bool:
    """Whether a file that holds a whole vocabulary is the same, byte for byte, in both folders."""
    for name in FILES[:3]:
        one, two = folder / name, other / name
        if one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes():
            return True
    return False


def _token_ids(folder: Path, config: PretrainedConfig | None = None) -> dict[str, int]:
    """Returns every token's id. `config` is that of the model in `folder`; code in the folder is not run."""
    tokens: dict[str, int] = load_tokenizer(folder, config=config).get_vocab()
    return tokens


def _difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    """A sentence with the number of ids that differ and the lowest of them."""
    different = different_ids(theirs, ours)
    examples = "; ".join(f"{id} is {quote(a)} there and {quote(b)} here" for id, a, b in different[:SHOWN])
    return (
        f"its tokenizer differs from the stores': {len(different):,} ids mean something else ({examples}); prepare the "
        "stores with the folder's tokenizer, or set start_from.vocabulary"
    )
