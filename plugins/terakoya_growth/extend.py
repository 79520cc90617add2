"""Adds the most useful new pieces of a corpus to a trained tokenizer, whose ids stay: `terakoya tokenizer extend`.

WordPiece gets whole words. BPE and unigram models get joined neighbours of the pieces that they divide the corpus
into, as BPE training would go on to join them (Purason et al., 2025, "Teaching Old Tokenizers New Words",
arXiv:2512.03989).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from terakoya.atomic_files import check_new_folder, new_folder
from terakoya.components.tokenizer import RECORD, load_tokenizer
from terakoya.corpus.beginnings import check_beginnings
from terakoya.corpus.corpus import Corpus, Reading
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya.process_pool import available_cores
from terakoya.toolkit.formats.model_files import tokenizer_files
from terakoya.toolkit.tokenizers.bert_folder import read_bert_folder
from terakoya.toolkit.tokenizers.bpe_merges import merge_pairs
from terakoya.toolkit.tokenizers.word_counts import Splitter, count_words
from terakoya.toolkit.tokenizers.word_splitters import build_splitter, user_dictionaries
from terakoya_tokenizer.wordpiece import PREFIX, WordPiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GAIN = 1e-4
"""By how much the logarithm of a new unigram piece's probability exceeds the sum of those of its old pieces, for each
piece that it saves."""
VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", RECORD)
"""Files of the old vocabulary, which the new folder has in tokenizer.json."""
_RUN = re.compile(r"\u2581?[^\W_]+")


@dataclass(frozen=True)
class Extension:
    """What is added to a vocabulary.

    Attributes:
        pieces: the new pieces; the first one's id is the old size.
        merges: pairs of pieces that a BPE model joins, in their order.
        before: tokens of the counted words in the old vocabulary.
        after: tokens of them in the new one.
    """

    pieces: Sequence[str]
    merges: Sequence[tuple[str, str]]
    before: int
    after: int


def extend_tokenizer(
    folder: Path,
    out: Path,
    corpus: Sequence[Path | str],
    *,
    add: int,
    min_frequency: int = 2,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **reading: Unpack[Reading],
) -> Mapping[str, Any]:
    """Writes into the new folder `out` the tokenizer in `folder` with up to `add` new pieces of `corpus`, each of which
    occurs at least `min_frequency` times: those that save the most tokens. Every old piece keeps its id. Returns facts.
    Raises UserError for a tokenizer of another kind, if no piece is new, or `out` exists; and as `Corpus` does."""
    check_new_folder(out)
    tokenizer = load_tokenizer(folder)
    is_japanese = type(tokenizer).__name__ == "BertJapaneseTokenizer"
    backend = None if is_japanese else getattr(tokenizer, "backend_tokenizer", None)
    if is_japanese and _has_characters_alone(folder):
        raise UserError(f"{folder}: expected a tokenizer with WordPiece, BPE or a unigram model, got one of characters")
    if not is_japanese and backend is None:
        raise UserError(
            f"{folder}: expected a tokenizer with a tokenizer.json or of BertJapaneseTokenizer, got "
            f"{type(tokenizer).__name__}, whose vocabulary Transformers cannot extend; convert it to a tokenizer.json"
        )
    content = {} if backend is None else json.loads(backend.to_str())
    kind = "WordPiece" if backend is None else content["model"]["type"]
    if kind not in ("WordPiece", "BPE", "Unigram"):
        raise UserError(f"{folder}: expected WordPiece, BPE or a unigram model, got {kind}")
    source = Corpus(find_files(corpus), **reading)
    check_beginnings(source)
    table = count_words(source, partial(_splitter, folder), processes=processes or available_cores(), progress=progress)
    ids = tokenizer.get_vocab()
    divide = _divider(folder, backend)
    if kind == "WordPiece":
        found = _whole_words(table.counts, ids, divide, tokenizer.unk_token_id, add=add, min_frequency=min_frequency)
    else:
        found = _joined_pieces(
            table.counts, ids, divide, tokenizer.unk_token_id, add=add, min_frequency=min_frequency
        )  # fmt: skip
    if not found.pieces:
        raise UserError(
            f"{folder}: no word of the corpus is new and occurs {min_frequency} times; give more text, or lower "
            "--min-frequency"
        )
    dictionaries = user_dictionaries(read_bert_folder(folder).config) if is_japanese else []
    with new_folder(out) as new:
        for file in tokenizer_files(folder):
            is_kept = (is_japanese or file.name not in VOCABULARY_FILES) and file.suffix in (".json", ".txt", ".jinja")
            if is_kept or str(file) in dictionaries:
                shutil.copyfile(file, new / file.name)
        if is_japanese:
            _append_words(new, ids, found.pieces)
        else:
            _write_model(new / "tokenizer.json", content, ids, found)
        _check(folder, new, ids, found.pieces)
    return {
        "pieces": len(ids) + len(found.pieces),
        "new_pieces": len(found.pieces),
        "tokens_before": found.before,
        "tokens_after": found.after,
        **table.facts(2_000_000),
    }


def _has_characters_alone(folder: Path) -> bool:
    """Whether no piece of the BertJapaneseTokenizer in `folder` has two characters, special ones aside."""
    bert = read_bert_folder(folder)
    if bert.config.get("subword_tokenizer_type", "wordpiece") != "wordpiece":
        return True
    special = {*bert.vocabulary.special}
    return not any(len(piece.removeprefix(PREFIX)) > 1 for piece, id in bert.pieces.items() if id not in special)


# ------------------------------------------------------------------------------------------------------------- words


def _splitter(folder: Path) -> Splitter:
    """Returns the function that splits a document into what the tokenizer in `folder` divides into pieces by itself:
    MeCab's words, or the parts that `tokenizers` makes; where these are whole lines, their runs of letters."""
    tokenizer = load_tokenizer(folder)
    if type(tokenizer).__name__ == "BertJapaneseTokenizer":
        bert = read_bert_folder(folder)
        words = build_splitter(bert.config, special=list(bert.special))
        lower = bool(bert.config.get("do_lower_case", False))
        return lambda text: (
            word.lower() if lower else word
            for line in words.split(words.lines(text))
            for word in line.split()
            if word not in bert.special
        )
    return partial(_parts, tokenizer.backend_tokenizer)


def _parts(backend: Tokenizer, text: str) -> Iterator[str]:
    for line in text.split("\n"):
        normal = backend.normalizer.normalize_str(line) if backend.normalizer else line
        if any(name in repr(backend.pre_tokenizer) for name in ("None", "Metaspace", "MergedWithPrevious")):
            if backend.pre_tokenizer is not None:
                normal = "".join(part for part, _ in backend.pre_tokenizer.pre_tokenize_str(normal))
            yield from _RUN.findall(normal)
        else:
            yield from (part for part, _ in backend.pre_tokenizer.pre_tokenize_str(normal))


def _divider(folder: Path, backend: Tokenizer | None) -> Callable[[str], list[int]]:
    """Returns the function from a word to the ids of its pieces."""
    if backend is None:
        bert = read_bert_folder(folder)
        return WordPiece(bert.pieces, bert.unknown).ids
    return lambda word: [token.id for token in backend.model.tokenize(word)]


# ------------------------------------------------------------------------------------------------------------ choice


def _whole_words(
    counts: Mapping[str, int],
    ids: Mapping[str, int],
    divide: Callable[[str], list[int]],
    unknown: int | None,
    *,
    add: int,
    min_frequency: int,
) -> Extension:
    """The words that save the most tokens as one piece each; an unknown word counts as if it were saved."""
    saved: dict[str, int] = {}
    before = 0
    for word, count in counts.items():
        pieces = divide(word)
        before += count * len(pieces)
        saves = count * (1 if unknown in pieces else len(pieces) - 1)
        if saves > 0 and count >= min_frequency and word not in ids and any(map(str.isalpha, word)):
            saved[word] = saves
    chosen = sorted(saved, key=lambda word: (-saved[word], word))[:add]
    less = sum(counts[word] * (len(divide(word)) - 1) for word in chosen)
    return Extension(chosen, (), before, before - less)


def _joined_pieces(
    counts: Mapping[str, int],
    ids: Mapping[str, int],
    divide: Callable[[str], list[int]],
    unknown: int | None,
    *,
    add: int,
    min_frequency: int,
) -> Extension:
    """The neighbours that BPE training would join next, in words without unknown characters."""
    by_id = {id: piece for piece, id in ids.items()}
    old_size = max(by_id) + 1
    pieces = [by_id.get(id, f"\0{id}") for id in range(old_size)]
    without_text = {id for piece, id in ids.items() if re.fullmatch(r"<0x[0-9A-F]{2}>", piece)} | {unknown}
    symbols: list[list[int]] = []
    times: list[int] = []
    for word, count in counts.items():
        divided = divide(word)
        if not without_text.intersection(divided):
            symbols.append(divided)
            times.append(count)
    before = sum(count * len(each) for each, count in zip(symbols, times, strict=True))
    merges = merge_pairs(
        np.array([id for each in symbols for id in each], np.int64),
        np.array([len(each) for each in symbols], np.int64),
        np.array(times, np.int64),
        pieces,
        join=lambda one, two: one + two,
        vocab_size=old_size + add,
        min_frequency=min_frequency,
    )
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    joined = {piece: id for id, piece in enumerate(pieces)}
    after = sum(
        count * _count_joined(each, ranks, pieces, joined) for each, count in zip(symbols, times, strict=True)
    )  # fmt: skip
    return Extension(pieces[old_size:], [(pieces[left], pieces[right]) for left, right in merges], before, after)


def _count_joined(
    symbols: Sequence[int], ranks: Mapping[tuple[int, int], int], pieces: Sequence[str], ids: Mapping[str, int]
) -> int:
    """The pieces of a word after the merges of `ranks`, as BPE applies them: always the first one that there is."""
    word = list(symbols)
    while True:
        best = min((ranks[pair] for pair in pairwise(word) if pair in ranks), default=None)
        if best is None:
            return len(word)
        at = next(place for place, pair in enumerate(pairwise(word)) if ranks.get(pair) == best)
        word[at : at + 2] = [ids[pieces[word[at]] + pieces[word[at + 1]]]]


# ------------------------------------------------------------------------------------------------------------- files


def _append_words(folder: Path, ids: Mapping[str, int], words: Sequence[str]) -> None:
    """Appends `words` to vocab.txt, and sets the size in the record."""
    file = folder / "vocab.txt"
    text = file.read_text(encoding="utf-8")
    lines = text.count("\n") + (not text.endswith("\n"))
    if max(ids.values()) + 1 != lines:
        raise UserError(
            f"{file.name}: expected {lines:,} ids, one for each line, got ids up to {max(ids.values()):,}: the folder "
            "adds tokens after its vocabulary; write them into vocab.txt"
        )
    text += "\n" * (not text.endswith("\n")) + "".join(f"{word}\n" for word in words)
    file.write_text(text, encoding="utf-8", newline="\n")
    record = folder / RECORD
    if record.is_file():
        content = json.loads(record.read_text(encoding="utf-8"))
        content["settings"]["vocab_size"] = lines + len(words)
        record.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n")


def _write_model(file: Path, content: dict[str, Any], ids: Mapping[str, int], found: Extension) -> None:
    """Writes `content`, that of a tokenizer.json, with the new pieces.

    Added tokens get a place in the model's own vocabulary: `tokenizers` would otherwise number them after the new
    pieces.
    """
    model, size = content["model"], max(ids.values()) + 1
    if model["type"] == "Unigram":
        scores = dict(map(tuple, model["vocab"]))
        lowest = min(scores.values())
        by_id = {id: piece for piece, id in ids.items()}
        if set(by_id) != set(range(size)):
            raise UserError(f"{file.name}: expected a piece for each id below {size:,}, got {len(by_id):,} pieces")
        model["vocab"] += [[by_id[id], lowest] for id in range(len(model["vocab"]), size)]
        for piece, (left, right) in zip(found.pieces, _first_merges(found), strict=True):
            scores[piece] = scores[left] + scores[right] + GAIN
            model["vocab"].append([piece, scores[piece]])
    else:
        model["vocab"] |= {**ids, **{piece: size + number for number, piece in enumerate(found.pieces)}}
    if model["type"] == "BPE":
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
        model["merges"] += [" ".join(pair) if as_text else list(pair) for pair in found.merges]
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n")


def _first_merges(found: Extension) -> Iterator[tuple[str, str]]:
    """Yields for each new piece the pair that makes it."""
    pairs: dict[str, tuple[str, str]] = {}
    for left, right in found.merges:
        pairs.setdefault(left + right, (left, right))
    for piece in found.pieces:
        yield pairs[piece]


def _check(folder: Path, new: Path, ids: Mapping[str, int], pieces: Sequence[str]) -> None:
    """Raises UserError unless Transformers loads `new` with every old id and the new pieces after them."""
    size = max(ids.values()) + 1
    expected = {**ids, **{piece: size + number for number, piece in enumerate(pieces)}}
    got = load_tokenizer(new).get_vocab()
    wrong = [piece for piece, id in expected.items() if got.get(piece) != id]
    if wrong:
        raise UserError(
            f"{folder}: expected a tokenizer whose files Transformers reads with more pieces, but {len(wrong):,} ids "
            f"change, the first that of {wrong[0]!r}; save it with tokenizer.save_pretrained as a tokenizer.json"
        )
