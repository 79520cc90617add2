"""Whether the ids of two stores, or of a store and a model, mean the same.

Two vocabularies of one size with the same special ids look alike to training, and a model that is trained on both
learns nothing. So the hashes are compared that `prepare` records of everything on which ids depend, and where they
differ the pieces themselves. Versions of libraries may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.atomic_files import FileFacts
from terakoya.components.tokenizer import load_tokenizer, try_tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.file_hashes import TOKENIZER
from terakoya.store.recorded_options import TEMPLATE_INPUT
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.formats.model_files import belongs_to_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHOWN = 5
"""Ids with another meaning that an error shows."""
FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "vocab.json", "tokenizer_config.json")
"""Tokenizer files; a folder with a tokenizer has at least one of them."""
_NO_VOCABULARY = (
    "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "terakoya.json", "config.json",
)  # fmt: skip
_VERSION = re.compile(r"\d+(\.\d+)+\S*")


def check_same_tokenizer(first: TokenStore, other: TokenStore) -> None:
    """Raises UserError unless the ids of both stores mean the same: with up to five that do not, or with what else of
    the tokenizers differs."""
    ours, theirs = _inputs(first), _inputs(other)
    same_facts = first.facts.vocabulary == other.facts.vocabulary
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if same_facts and not (ours and theirs and changed):
        return
    reason = find_different_ids(first.tokenizer_folder, other.tokenizer_folder)
    if not reason and same_facts and _same_rules(first.tokenizer_folder, other.tokenizer_folder):
        return
    reason = reason or (f"other: {', '.join(changed)}" if changed else "other sizes or special ids")
    raise UserError(
        f"{other.folder}: was prepared with another tokenizer than {first.folder} ({reason}); prepare it with the same"
    )


def check_tokenizer_of_run(store: TokenStore, folder: Path) -> None:
    """Raises UserError if the ids of `store` mean something else in a run's tokenizer, which is in `folder`."""
    if vocabulary_files(store.tokenizer_folder) == vocabulary_files(folder):
        return
    if reason := find_different_ids(folder, store.tokenizer_folder):
        raise UserError(
            f"{store.folder}: was prepared with another tokenizer than the run's ({reason}); prepare it with {folder}"
        )


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
        theirs = load_tokenizer(folder, config=config).get_vocab()
        ours = load_tokenizer(tokenizer_folder).get_vocab()
    except UserError as error:
        problems.append(f"its tokenizer ({files[0]}) cannot be compared with the stores': {error}")
        return problems
    if theirs != ours:
        different = different_ids(theirs, ours)
        examples = "; ".join(f"{id} is {quote(a)} there and {quote(b)} here" for id, a, b in different[:SHOWN])
        problems.append(
            f"its tokenizer differs from the stores': {len(different):,} ids mean something else ({examples}); prepare "
            "the stores with the folder's tokenizer, or set start_from.vocabulary"
        )
    return [] if is_padded and theirs == ours else problems


def _same_files(folder: Path, other: Path) -> bool:
    """Whether a file that holds a whole vocabulary is the same, byte for byte, in both folders."""
    pairs = [(folder / name, other / name) for name in FILES[:3]]
    return any(one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes() for one, two in pairs)


def find_different_ids(first: Path, other: Path) -> str:
    """Describes the ids that mean different things in the tokenizers of two folders; "" if none does, or if
    Transformers cannot load both."""
    ours, theirs = _read_pieces(first), _read_pieces(other)
    return describe_different_ids(ours, theirs, first, other) if ours and theirs else ""


def describe_different_ids(ours: Mapping[str, int], theirs: Mapping[str, int], first: Path, other: Path) -> str:
    """Returns how many ids mean different things in the tokenizers of two folders, and the first of them; "" if none
    does."""
    different = different_ids(ours, theirs)
    examples = "; ".join(f"id {id} is {quote(a)} in {first}, {quote(b)} in {other}" for id, a, b in different[:SHOWN])
    return f"{len(different):,} ids mean something else: {examples}" if different else ""


def different_ids(first: Mapping[str, int], other: Mapping[str, int]) -> list[tuple[int, str | None, str | None]]:
    """Returns the ids whose pieces differ, ascending, with both pieces; None where there is none."""
    ours, theirs = ({id: piece for piece, id in pieces.items()} for pieces in (first, other))
    both = [(id, ours.get(id), theirs.get(id)) for id in sorted(ours.keys() | theirs.keys())]
    return [(id, a, b) for id, a, b in both if a != b]


def quote(piece: str | None) -> str:
    """Returns a piece as a message shows it."""
    return "no piece" if piece is None else json.dumps(piece, ensure_ascii=False)


def _inputs(store: TokenStore) -> dict[str, str]:
    """What the store's ids depend on, by name, without versions of libraries."""
    recorded = {k: v for k, v in store.facts.inputs.items() if k.startswith("tokenizer ") and k != TEMPLATE_INPUT}
    return {name: value for name, value in recorded.items() if not _VERSION.fullmatch(value)}


def vocabulary_files(folder: Path) -> dict[str, FileFacts]:
    """The files of a tokenizer's folder, which may hold a model, too, without chat template and configuration."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and _decides_ids(file)]
    return {str(file.relative_to(folder)): FileFacts.of(file) for file in files}


def recorded_vocabulary(store: TokenStore) -> dict[str, str]:
    """The hashes that `store.json` records of the files that `vocabulary_files` returns, sorted."""
    files = sorted((Path(name), facts.sha256) for name, facts in store.facts.files.items())
    return {str(file): digest for file, digest in files if file.parts[0] == TOKENIZER and _decides_ids(file)}


def _decides_ids(file: Path) -> bool:
    return file.name not in _NO_VOCABULARY and not belongs_to_model(file)


def _read_pieces(folder: Path) -> dict[str, int]:
    """The id of every piece of the tokenizer in `folder`; none if Transformers cannot load it."""
    tokenizer = try_tokenizer(folder)
    return {} if tokenizer is None else dict(tokenizer.get_vocab())


def _same_rules(first: Path, other: Path) -> bool:
    """Whether two tokenizers of the `tokenizers` library split text by the same rules, however they were saved."""
    rules = []
    for folder in (first, other):
        backend = getattr(try_tokenizer(folder), "backend_tokenizer", None)
        if backend is None:
            return False
        rules.append({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    return rules[0] == rules[1]
