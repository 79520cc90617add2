"""A SentencePiece model as a tokenizer.json of the `tokenizers` library, with the model's own ids, so that Transformers
knows which characters each token stands for. See docs/design/sentencepiece-offsets.md.

The library's own converter is no way: its character map (`Precompiled`) reads graphemes, so that ｶﾞ and か with a
separate voiced mark stay apart, and its unigram model reads a literal <s> that only normalisation makes.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from terakoya.toolkit.tokenizers.fast_unigram import UNKNOWN_PENALTY
from terakoya_tokenizer.normalization import LAST

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, normalizers

SPACE = "\u2581"
GRID = 2.0**-8
"""Scores of unigram models are multiples of this. SentencePiece adds them up in float32, `tokenizers` in float64: both
sums are exact, and so ties are ties for both, up to `EXACT`."""
EXACT = 2**24 * GRID
"""The largest sum of multiples of `GRID` of which float32 rounds none."""
SLACK = 1024.0
"""By how much the cost of a path that is compared can exceed the best one's."""
RULES = ("nmt_nfkc", "nfkc", "identity")
_PLAIN = "0-9A-Za-zぁ-んァ-ヶ一-龥、。「」"
"""Characters, as a class of a regular expression, that no rule changes, nor what stands beside them."""
_BYTE = r"<0x[0-9A-F]{2}>"
_BEGINS, _SUSPECT = 1, 2
"""Marks of characters: one becomes the first of a literal; with one, `tokenizers` may normalise otherwise."""


class NotConvertibleError(ValueError):
    """A tokenizer.json cannot give the model's ids; the message says why."""


def round_scores(model: bytes, *, max_sentence_length: int | None = None) -> bytes:
    """Returns the unigram `model` with its scores rounded to `GRID`; other models as they are. `max_sentence_length`,
    if given, is what the model says about its training."""
    proto = _parse(model)
    if max_sentence_length is not None:
        proto.trainer_spec.max_sentence_length = max_sentence_length
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        for piece in proto.pieces:
            if piece.type == piece.NORMAL:
                piece.score = round(piece.score / GRID) * GRID
    content: bytes = proto.SerializeToString()
    return content


def build_backend(model: bytes, roles: Mapping[str, str], *, cls_sep: bool) -> Tokenizer:
    """Returns the tokenizer of `model`, whose special tokens are the pieces of `roles` and all control pieces. With
    `cls_sep` it puts [CLS] and [SEP] around texts. Raises NotConvertibleError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    proto = _parse(model)
    _check(proto)
    spec = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == piece.UNKNOWN)
    if spec.model_type == spec.UNIGRAM:
        vocabulary = [
            (piece.piece, -0.1 if piece.type == piece.USER_DEFINED else piece.score)
            for piece in proto.pieces  # a symbol's score is the one that SentencePiece's unigram model gives it
        ]
        tokenizer = Tokenizer(models.Unigram(vocabulary, unknown, spec.byte_fallback))
        cuts = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in _literals(proto).items())
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    else:
        tokenizer = Tokenizer(
            models.BPE(
                {piece: number for number, piece in enumerate(pieces)},
                _merges(proto),
                unk_token=pieces[unknown],
                fuse_unk=True,
                byte_fallback=spec.byte_fallback,
            )
        )
    prefix = proto.normalizer_spec.add_dummy_prefix
    steps = [*_character_steps(proto), *_space_steps(proto.normalizer_spec)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    for symbol in (piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED):
        if not tokenizer.normalizer.normalize_str(symbol).endswith(symbol):
            raise NotConvertibleError(f"its user-defined piece {symbol} is one that normalisation changes")
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    special = dict.fromkeys([*roles.values(), *_silent(proto)])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    if cls_sep:
        cls, sep = roles["cls"], roles["sep"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, pieces.index(cls)), (sep, pieces.index(sep))],
        )
    return tokenizer


class Divergence:
    """Which texts a tokenizer.json divides otherwise than the model; most are equal by their characters.

    Attributes:
        unigram: whether the model is one.
    """

    def __init__(self, processor: SentencePieceProcessor, backend: Callable[[], Tokenizer]) -> None:
        """`backend` loads the tokenizer.json, when a text is suspect."""
        proto = _parse(processor.serialized_model_proto())
        rules = proto.normalizer_spec
        self._normalize: Callable[[str], str] = processor.normalize
        self._backend = functools.cache(backend)
        self.unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
        self._exact = not self.unigram or _adds_up(proto)
        literals = _literals(proto, symbols=True) if self.unigram else {}
        patterns = [f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in literals.items()]
        self._literal = re.compile("|".join(patterns) or "(?!)")
        self._marks = np.zeros(sys.maxunicode + 1, np.uint8)
        for mark, characters in (
            (_BEGINS, _becoming(tuple(sorted(literals))) if literals else []),
            (_SUSPECT, _suspects() if rules.precompiled_charsmap else []),
        ):
            self._marks[[*map(ord, characters)]] |= mark
        lowest = min((piece.score for piece in proto.pieces if piece.type == piece.NORMAL), default=0.0)
        scores = [piece.score if piece.type == piece.NORMAL else lowest - UNKNOWN_PENALTY for piece in proto.pieces]
        self._costs = -np.array(scores)
        self._longest = int((EXACT - SLACK) / (UNKNOWN_PENALTY - lowest))
        pieces_end_at_spaces = not any(SPACE in piece.piece[1:] for piece in proto.pieces)
        self._spaces = [one for one in " \n" if processor.normalize(f"木{one}木") == processor.normalize("木 木")]
        self._divides = (
            self._exact
            and self.unigram
            and pieces_end_at_spaces
            and rules.add_dummy_prefix
            and rules.remove_extra_whitespaces
            and bool(self._spaces)
        )
        self._space = re.compile(f"(?<=[{_PLAIN}])[{''.join(self._spaces) or ' '}](?=[{_PLAIN}])")

    def divide(self, text: str) -> list[str]:
        """Returns parts of `text` whose ids, one after the other, are its ids by the tokenizer.json; as short as its
        spaces allow where it is long. No piece has a space within, so the best path passes each of them, and a part
        begins with the space that the model puts before it."""
        parts, start = [], 0
        while self._divides and len(text) - start >= self._longest:
            stop = start + self._longest
            while (at := max(text.rfind(one, start, stop) for one in self._spaces)) >= 0:
                if self._space.match(text, at):
                    break
                stop = at
            else:
                found = self._space.search(text, start + self._longest)
                if found is None:
                    break
                at = found.start()
            parts.append(text[start:at])
            start = at + 1
        return [*parts, text[start:]]

    def find(self, texts: Sequence[str], rows: Sequence[np.ndarray]) -> list[int]:
        """Returns the numbers of those of `texts`, whose ids are `rows` by the model, that have others by the
        tokenizer.json. Where the scores add up exactly, few texts have to be divided by both."""
        numbers: Sequence[int] = range(len(texts))
        if self._exact:
            codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
            ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
            marks = self._marks.take(codes)
            places = np.flatnonzero(marks)
            begins, suspect = (
                {*np.searchsorted(ends, places[marks[places] & mark > 0], "right").tolist()}
                for mark in (_BEGINS, _SUSPECT)
            )
            suspect.update(n for n in begins if self._literal.search(self._normalize(texts[n])))
            # A text of which nothing is left is one space where SentencePiece keeps spaces, and nothing to the library.
            suspect.update(n for n in numbers if len(rows[n]) == 1 or self._rounds(texts[n], rows[n]))
            if not (numbers := sorted(suspect)):
                return []
        others = self._backend().encode_batch_fast([texts[number] for number in numbers], add_special_tokens=False)
        return [number for number, other in zip(numbers, others, strict=True) if rows[number].tolist() != other.ids]

    def _rounds(self, text: str, ids: np.ndarray) -> bool:
        if len(text) < self._longest or not self.unigram:
            return False
        unknown = len(text) * self._costs.max() * bool((self._costs[ids] == self._costs.max()).any())
        return bool(self._costs[ids].sum() + unknown + SLACK > EXACT)


def _parse(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)


def adds_up(model: bytes) -> bool:
    """Returns whether float32, in which SentencePiece adds the scores of `model` up, and float64, in which `tokenizers`
    does, give the same sums."""
    proto = _parse(model)
    return proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM or _adds_up(proto)


def _adds_up(proto: Any) -> bool:
    scores = [piece.score for piece in proto.pieces if piece.type == piece.NORMAL]
    return all((score / GRID).is_integer() and score <= 0 for score in scores)


def _silent(proto: Any) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type in (piece.CONTROL, piece.UNKNOWN)]


def _check(proto: Any) -> None:
    spec, rules, kind_of = proto.trainer_spec, proto.normalizer_spec, proto.SentencePiece
    if spec.model_type == spec.WORD:
        raise NotConvertibleError("it is a model of words")
    if spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise NotConvertibleError("it marks spaces otherwise than before a word")
    if rules.name not in RULES or bool(rules.precompiled_charsmap) == (rules.name == "identity"):
        raise NotConvertibleError(f'it normalises by "{rules.name}", which `tokenizers` does not know')
    kinds = {piece.type for piece in proto.pieces}
    without_rule = {kind_of.UNUSED} if spec.model_type == spec.UNIGRAM else {kind_of.UNUSED, kind_of.USER_DEFINED}
    if kinds & without_rule:
        raise NotConvertibleError("it has user-defined or unused pieces, for which `tokenizers` has no rule")
    if any(len(piece) < 2 or piece[0] not in "<[" or SPACE in piece for piece in _silent(proto)):
        raise NotConvertibleError("a special token begins with another character than < or [")


def _literals(proto: Any, *, symbols: bool = False) -> dict[str, list[str]]:
    """Returns the first character of each piece that text never becomes, with patterns of what follows; with `symbols`,
    also of each user-defined piece."""
    found: dict[str, list[str]] = {}
    defined = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED] if symbols else []
    for piece in (*(each for each in _silent(proto) if len(each) > 1), *defined):
        found.setdefault(piece[0], []).append(re.escape(piece[1:]))
    if proto.trainer_spec.byte_fallback:
        found.setdefault("<", []).append(_BYTE[1:])
    return found


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Returns all pairs that make a piece of a BPE model, the best piece first."""
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        return []
    number = {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type == piece.NORMAL}
    found = []
    for whole in number:
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in number and right in number:
                found.append((-proto.pieces[number[whole]].score, number[left], number[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _character_steps(proto: Any) -> list[normalizers.Normalizer]:
    """Returns the steps that map characters as SentencePiece does: NFKC, and around it what is not NFKC.

    Its rules remove control characters, make others spaces, and keep ～, which NFKC makes ~. A character that is
    kept is a removed one while NFKC runs.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Regex, normalizers

    if not proto.normalizer_spec.precompiled_charsmap:
        return []
    bare = type(proto)()
    bare.CopyFrom(proto)
    rules = bare.normalizer_spec
    rules.add_dummy_prefix = rules.remove_extra_whitespaces = rules.escape_whitespaces = False
    characters = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000]
    after = SentencePieceProcessor(model_proto=bare.SerializeToString()).normalize(characters)
    nfkc = normalizers.NFKC()
    changed = {one: to for one, to in zip(characters, after, strict=True) if to != nfkc.normalize_str(one)}
    removed = [one for one, to in changed.items() if not to]
    spaces = [one for one, to in changed.items() if to == " "]
    kept = [one for one, to in changed.items() if nfkc.normalize_str(to) != to]
    if len(kept) > len(removed) or any(changed[one] != one for one in kept):
        raise NotConvertibleError("its rules are not NFKC's")
    others = [one for one in changed if one not in {*removed, *spaces, *kept} and unicodedata.category(one) != "Cn"]
    steps: list[normalizers.Normalizer] = []
    for group, to in ((removed, ""), (spaces, " ")):
        if group:
            codes = "".join(f"\\x{{{ord(one):X}}}" for one in group)
            steps.append(normalizers.Replace(Regex(f"[{codes}]"), to))
    steps += [normalizers.Replace(one, changed[one]) for one in others]
    steps += [normalizers.Replace(one, place) for one, place in zip(kept, removed, strict=False)]
    steps.append(nfkc)
    steps += [normalizers.Replace(place, one) for one, place in zip(kept, removed, strict=False)]
    return steps


def _space_steps(rules: Any) -> list[normalizers.Normalizer]:
    """Returns the steps for spaces. At the end SentencePiece also removes a literal ▁."""
    from tokenizers import Regex, normalizers

    steps: list[normalizers.Normalizer] = []
    if rules.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +"), ""),
            normalizers.Replace(Regex(f"[ {SPACE}]+\\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    return [*steps, normalizers.Replace(" ", SPACE)]


@functools.cache
def _suspects() -> list[str]:
    """Returns the characters that may join the one before them, and those that `tokenizers` or Python, whose versions
    of Unicode are older, do not know."""
    from tokenizers import normalizers

    nfkc = normalizers.NFKC()
    characters = [chr(code) for code in range(0x80, LAST + 1) if not 0xD800 <= code < 0xE000]
    parts = (unicodedata.decomposition(one).split() for one in characters)
    seconds = {chr(int(each[1], 16)) for each in parts if len(each) == 2 and not each[0].startswith("<")}
    seconds.update(map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))))  # Hangul's vowels and final consonants
    found = ["\0"]
    for one in characters:
        whole = unicodedata.normalize("NFKC", one)
        first = unicodedata.normalize("NFKD", one)[0]
        if (
            unicodedata.combining(first)
            or first in seconds
            or unicodedata.category(one) == "Cn"
            or (whole != one and nfkc.normalize_str(one) != whole)
        ):
            found.append(one)
    return found


@functools.cache
def _becoming(targets: tuple[str, ...]) -> list[str]:
    characters = (chr(code) for code in range(LAST + 1) if not 0xD800 <= code < 0xE000)
    return [one for one in characters if not set(targets).isdisjoint(unicodedata.normalize("NFKC", one))]
