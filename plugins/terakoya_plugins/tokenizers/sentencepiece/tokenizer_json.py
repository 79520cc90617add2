"""A SentencePiece model as a tokenizer.json of the `tokenizers` library, with the model's own ids, so that Transformers
knows which characters each token stands for. See docs/design/sentencepiece-offsets.md.

The library's own converter is no way: its character map (`Precompiled`) reads graphemes, so that ｶﾞ and か with a
separate voiced mark stay apart, and its unigram model reads a literal <s> that only normalisation makes.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

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
UNKNOWN_PENALTY = 10.0
"""An unknown character's score is the lowest one minus this (SentencePiece's kUnkPenalty)."""
RULES = ("nmt_nfkc", "nfkc", "identity")
_BYTE = r"<0x[0-9A-F]{2}>"
_LAST = 0x1FFFF
"""No character beyond joins the one before it."""


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
    """Returns the tokenizer of `model`, whose special tokens are the pieces of `roles`. With `cls_sep` it puts [CLS]
    and [SEP] around texts. Raises NotConvertibleError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    proto = _parse(model)
    _check(proto, set(roles.values()))
    spec = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == piece.UNKNOWN)
    if spec.model_type == spec.UNIGRAM:
        vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
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
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in roles.values()])
    if cls_sep:
        cls, sep = roles["cls"], roles["sep"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, pieces.index(cls)), (sep, pieces.index(sep))],
        )
    return tokenizer


class Divergence:
    """Which texts a tokenizer.json divides otherwise than the model; most are equal by their characters."""

    def __init__(self, processor: SentencePieceProcessor, backend: Callable[[], Tokenizer]) -> None:
        """`backend` loads the tokenizer.json, when a text is suspect."""
        proto = _parse(processor.serialized_model_proto())
        self._normalize: Callable[[str], str] = processor.normalize
        self._backend = functools.cache(backend)
        self._unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
        literals = [f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in _literals(proto).items()]
        self._literal = re.compile("|".join(literals) if self._unigram else "(?!)")
        starts = _becoming(tuple(sorted(_literals(proto)))) if self._unigram else ""
        suspects = _suspects() if proto.normalizer_spec.precompiled_charsmap else ""
        self._suspect = re.compile(f"[{starts}{suspects}]" if starts or suspects else "(?!)")
        lowest = min((piece.score for piece in proto.pieces if piece.type == piece.NORMAL), default=0.0)
        scores = [piece.score if piece.type == piece.NORMAL else lowest - UNKNOWN_PENALTY for piece in proto.pieces]
        self._costs = -np.array(scores)
        self._longest = int((EXACT - SLACK) / (UNKNOWN_PENALTY - lowest))

    def __call__(self, text: str, ids: np.ndarray) -> bool:
        """Returns whether `text`, whose ids are `ids` by the model, may have others by the tokenizer.json."""
        if self._suspect.search(text):
            normal = self._normalize(text)
            if self._literal.search(normal) or normal != self._backend().normalizer.normalize_str(text):
                return True
        if len(text) < self._longest or not self._unigram:
            return False
        unknown = len(text) * self._costs.max() * bool((self._costs[ids] == self._costs.max()).any())
        return bool(self._costs[ids].sum() + unknown + SLACK > EXACT)


def _parse(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)


def _check(proto: Any, special: set[str]) -> None:
    """Raises NotConvertibleError for a model whose ids a tokenizer.json cannot give."""
    spec, rules = proto.trainer_spec, proto.normalizer_spec
    kinds: dict[int, list[str]] = {}
    for piece in proto.pieces:
        kinds.setdefault(piece.type, []).append(piece.piece)
    kind_of = proto.SentencePiece
    silent = {*kinds.get(kind_of.CONTROL, ()), *kinds.get(kind_of.UNKNOWN, ())}
    if spec.model_type == spec.WORD:
        raise NotConvertibleError("it is a model of words")
    if spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise NotConvertibleError("it marks spaces otherwise than before a word")
    if rules.name not in RULES or bool(rules.precompiled_charsmap) == (rules.name == "identity"):
        raise NotConvertibleError(f'it normalises by "{rules.name}", which `tokenizers` does not know')
    if kinds.get(kind_of.USER_DEFINED) or kinds.get(kind_of.UNUSED):
        raise NotConvertibleError("it has user-defined or unused pieces, for which `tokenizers` has no rule")
    if silent - special:
        raise NotConvertibleError(f"no role has the piece {min(silent - special)}, which text never contains")
    if any(len(piece) < 2 or piece[0] not in "<[" or SPACE in piece for piece in silent):
        raise NotConvertibleError("a special token begins with another character than < or [")
    scores = [piece.score for piece in proto.pieces if piece.type == kind_of.NORMAL]
    if spec.model_type == spec.UNIGRAM and not all((score / GRID).is_integer() and score <= 0 for score in scores):
        raise NotConvertibleError(
            "SentencePiece adds its scores up in float32 and `tokenizers` in float64, so that near ties differ; models "
            "that terakoya trains have scores that both add up exactly"
        )


def _literals(proto: Any) -> dict[str, list[str]]:
    """Returns the first character of each piece that text never becomes, with patterns of what follows."""
    found: dict[str, list[str]] = {}
    for piece in proto.pieces:
        if piece.type in (piece.CONTROL, piece.UNKNOWN) and len(piece.piece) > 1:
            found.setdefault(piece.piece[0], []).append(re.escape(piece.piece[1:]))
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
def _suspects() -> str:
    """Returns ranges of a regular expression's class: the characters that may join the one before them, and those that
    `tokenizers` or Python, whose versions of Unicode are older, do not know."""
    from tokenizers import normalizers

    nfkc = normalizers.NFKC()
    characters = [chr(code) for code in range(0x80, _LAST + 1) if not 0xD800 <= code < 0xE000]
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
    return _ranges(found)


@functools.cache
def _becoming(targets: tuple[str, ...]) -> str:
    """Returns the characters that NFKC makes one of `targets`, as ranges of a regular expression's class."""
    characters = (chr(code) for code in range(_LAST + 1) if not 0xD800 <= code < 0xE000)
    return _ranges(one for one in characters if not set(targets).isdisjoint(unicodedata.normalize("NFKC", one)))


def _ranges(characters: Iterable[str]) -> str:
    codes = sorted(map(ord, characters))
    parts, start = [], None
    for code, following in zip(codes, [*codes[1:], math.inf], strict=True):
        start = code if start is None else start
        if following != code + 1:
            parts.append(f"\\U{start:08x}-\\U{code:08x}")
            start = None
    return "".join(parts)
