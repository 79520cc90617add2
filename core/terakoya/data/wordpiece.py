"""WordPiece: cutting words into pieces, and learning the pieces from a table of word counts.

Cutting is BERT's greedy longest match (https://arxiv.org/abs/1609.08144, section 4.1). Learning is what the field means
by it: `tokenizers`' `BertWordPieceTokenizer`, byte-pair merges over words whose pieces after the first begin with `##`.
That library takes running text only and breaks ties by the order of a hash table; here counts go in, however large,
and equal counts are taken in the order of the pieces' ids, so that the same counts give the same vocabulary.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from terakoya.errors import UserError

PREFIX = "##"
MAX_CHARACTERS = 100
"""Longer words become the unknown token (Transformers' `WordpieceTokenizer`)."""

_SHIFT = 32  # a pair of piece ids as one integer, in the order of the pairs


class WordPiece:
    """Cuts words into the ids of their pieces."""

    def __init__(self, vocabulary: Mapping[str, int], unknown: int) -> None:
        """`unknown` is the id of a word that cannot be cut into pieces of `vocabulary`."""
        self._unknown = unknown
        self._first = dict(vocabulary)
        self._next = {piece[len(PREFIX) :]: id for piece, id in vocabulary.items() if piece.startswith(PREFIX)}
        self._longest = max(map(len, vocabulary), default=0)

    def ids(self, word: str) -> list[int]:
        """The ids of one word's pieces; several words, if it holds white space; none, if it holds nothing else."""
        ids: list[int] = []
        for part in word.split():
            ids += self._part(part)
        return ids

    def _part(self, word: str) -> list[int]:
        length = len(word)
        if length > MAX_CHARACTERS:
            return [self._unknown]
        ids: list[int] = []
        start, pieces = 0, self._first
        while start < length:
            for stop in range(min(length, start + self._longest), start, -1):
                id = pieces.get(word[start:stop])
                if id is not None:
                    ids.append(id)
                    start, pieces = stop, self._next
                    break
            else:
                return [self._unknown]
        return ids


def bert_words(counts: Mapping[str, int]) -> Counter[str]:
    """Word counts as `BertWordPieceTokenizer` sees them in training: control characters are dropped, punctuation stands
    alone; accents (dakuten) and case stay."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    normalize = BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
    ).normalize_str
    split = BertPreTokenizer().pre_tokenize_str
    words: Counter[str] = Counter()
    for text, count in counts.items():
        for word, _ in split(normalize(text)):
            words[word] += count
    return words


def train_wordpiece(
    counts: Mapping[str, int],
    *,
    vocab_size: int,
    min_frequency: int,
    limit_alphabet: int,
    special_tokens: Sequence[str],
) -> list[str]:
    """The vocabulary learnt from `counts` (word -> how often), by id: special tokens, single characters, the same
    inside words, then merges in the order they were made.

    At most `limit_alphabet` characters are kept, the most frequent; pieces come from pairs seen at least
    `min_frequency` times. Fewer than `vocab_size` are returned when no such pair is left.

    Raises UserError if special tokens and characters alone do not fit.
    """
    learner = _Learner(counts, limit_alphabet, special_tokens)
    needed = len(learner.pieces)
    if needed > vocab_size:
        raise UserError(
            f"vocab_size: expected at least {needed:,} for the special tokens and the characters of this corpus, got "
            f"{vocab_size:,}; raise vocab_size or lower limit_alphabet (now {limit_alphabet:,})"
        )
    learner.merge(vocab_size, min_frequency)
    return learner.pieces


class _Learner:
    """Byte-pair merges over a table of word counts."""

    def __init__(self, counts: Mapping[str, int], limit_alphabet: int, special_tokens: Sequence[str]) -> None:
        alphabet: Counter[str] = Counter()
        for word, count in counts.items():
            for character in word:
                alphabet[character] += count
        kept = sorted(alphabet, key=lambda character: (-alphabet[character], character))[:limit_alphabet]
        self.pieces = list(dict.fromkeys([*special_tokens, *sorted(kept)]))
        inside = {character for word in counts for character in word[1:]} & set(kept)
        self.pieces += [piece for each in sorted(inside) if (piece := PREFIX + each) not in set(special_tokens)]
        self._ids = {piece: id for id, piece in enumerate(self.pieces)}
        first = {character: self._ids[character] for character in kept}
        other = {character: self._ids[PREFIX + character] for character in inside}
        self._counts = list(counts.values())
        self._words = [
            [(other if index else first)[character] for index, character in enumerate(word) if character in first]
            for word in counts
        ]

    def merge(self, vocab_size: int, min_frequency: int) -> None:
        """Joins the most frequent pair of neighbours, again and again."""
        counts, words, ids, pieces = self._counts, self._words, self._ids, self.pieces
        pairs: defaultdict[int, int] = defaultdict(int)
        places: defaultdict[int, set[int]] = defaultdict(set)
        for index, word in enumerate(words):
            for left, right in itertools.pairwise(word):
                pair = left << _SHIFT | right
                pairs[pair] += counts[index]
                places[pair].add(index)
        # (-count, pair, serial, words): a pair that comes up in several merges is there once for each.
        serial = 0
        queue: list[tuple[int, int, int, set[int]]] = []
        for serial, (pair, where) in enumerate(places.items()):
            queue.append((-pairs[pair], pair, serial, where))
        heapq.heapify(queue)
        while queue and len(pieces) < vocab_size:
            count, pair, _, where = heapq.heappop(queue)
            if pairs[pair] != -count:
                if pairs[pair] > 0:
                    serial += 1
                    heapq.heappush(queue, (-pairs[pair], pair, serial, where))
                continue
            if -count < max(1, min_frequency):
                return
            left, right = pair >> _SHIFT, pair & ((1 << _SHIFT) - 1)
            piece = pieces[left] + pieces[right].removeprefix(PREFIX)
            merged = ids.setdefault(piece, len(pieces))
            if merged == len(pieces):
                pieces.append(piece)
            appeared: defaultdict[int, set[int]] = defaultdict(set)
            for index in where:
                for changed, change in _merge_word(words[index], left, right, merged):
                    pairs[changed] += change * counts[index]
                    if change > 0:
                        appeared[changed].add(index)
            for changed, added in appeared.items():
                if pairs[changed] > 0:
                    serial += 1
                    heapq.heappush(queue, (-pairs[changed], changed, serial, added))


def _merge_word(word: list[int], left: int, right: int, merged: int) -> Iterable[tuple[int, int]]:
    """Joins `left` and `right` wherever they meet in `word`, in place. Returns pairs that came (+1) and went (-1)."""
    changes: list[tuple[int, int]] = []
    index = 0
    while index < len(word) - 1:
        if word[index] == left and word[index + 1] == right:
            if index > 0:
                changes.append((word[index - 1] << _SHIFT | left, -1))
                changes.append((word[index - 1] << _SHIFT | merged, 1))
            word[index : index + 2] = [merged]
            if index < len(word) - 1:
                changes.append((right << _SHIFT | word[index + 1], -1))
                changes.append((merged << _SHIFT | word[index + 1], 1))
        index += 1
    return changes
