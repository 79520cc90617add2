"""Documents of rows, named for people: their store, their numbers in it, and their first words.

A store records neither the files nor the lines that its documents come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.log import plural
from terakoya.rows.loader import Loader
from terakoya.store.token_store import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Documents of each store that are named with their first words."""
FIRST_TOKENS = 16
FIRST_CHARACTERS = 40


def documents_by_store(loader: Loader, start: int, stop: int) -> list[tuple[TokenStore, np.ndarray]]:
    """Returns the numbers, from 0 and sorted, of the documents with text in the rows [start, stop) of the order, by
    store. Raises UserError for a damaged store."""
    found: dict[str, tuple[TokenStore, list[np.ndarray]]] = {}
    for source, epoch, positions, _ in loader.parts(start, stop):
        store = source.store
        found.setdefault(str(store.folder), (store, []))[1].append(source.documents(epoch, positions))
    return [(store, np.unique(np.concatenate(numbers))) for store, numbers in found.values()]


def describe_documents(documents: Sequence[tuple[TokenStore, np.ndarray]]) -> str:
    """Returns which documents these are: the first ones of each store with their first words."""
    return "; ".join(_describe_documents(store, numbers) for store, numbers in documents)


def _describe_documents(store: TokenStore, numbers: np.ndarray) -> str:
    shown = islice(_name_documents(store, numbers), SHOWN)
    named = [f"{number:,} ({words})" if words else f"{number:,}" for number, words in shown]
    listed, more = ", ".join(named), len(numbers) - len(named)
    if more:
        return f"documents {listed} and {more:,} more of {store.folder}"
    return f"document{plural(len(named))} {listed} of {store.folder}"


def _name_documents(store: TokenStore, numbers: Sequence[int] | np.ndarray) -> Iterator[tuple[int, str]]:
    tokenizer = _tokenizer(store.tokenizer_folder)
    for number in map(int, numbers):
        begin, end = store.document_starts(np.array([number, number + 1])).tolist()
        ids = store.ids(begin, min(end, begin + FIRST_TOKENS)).tolist()
        text = "" if tokenizer is None else " ".join(str(tokenizer.decode(ids)).split())
        cut = text[:FIRST_CHARACTERS].rstrip()
        whole = len(cut) == len(text) and end - begin <= FIRST_TOKENS
        yield number, f'"{cut}{"" if whole else "..."}"' if text else ""


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer in `folder`; None where it cannot be loaded here, as numbers name documents, too."""
    with contextlib.suppress(UserError, OSError):
        return load_tokenizer(folder)
    return None
