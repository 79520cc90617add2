"""The library's `Encoding`, made from tokens and their places in a text, now or when somebody asks for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, overload

from tokenizers import Encoding

from terakoya_tokenizer.spans import EncodedTexts


class QuotedTokens(dict[int, str]):
    """The JSON strings of tokens by their ids."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        self._token = token

    def __missing__(self, id: int) -> str:
        self[id] = json.dumps(self._token(id))
        return self[id]


class TokenRun:
    """The tokens of a text among those of several.

    Attributes:
        ids: of the tokens (T).
    """

    __slots__ = ("_encoded", "_texts", "ids")

    def __init__(self, encoded: EncodedTexts, first: int, last: int) -> None:
        """The text consists of those numbered `first` to `last` - 1 of `encoded`: one, or several words."""
        self._encoded = encoded
        self._texts = [
            slice(*places) for places in zip(encoded.firsts[first:last], encoded.lasts[first:last], strict=True)
        ]
        self.ids = self._tokens(encoded.ids)

    def offsets(self) -> list[tuple[int, int]]:
        """Returns start and stop of each token."""
        return self._tokens(self._encoded.offsets)

    def words(self) -> list[int]:
        """Returns the number of each token's word."""
        return self._tokens(self._encoded.words)

    def encoding(self, quoted: QuotedTokens) -> Encoding:
        """Returns the tokens as the library has them before it adds special tokens."""
        return PlainEncoding(self, None, quoted).as_library({})

    def _tokens(self, values: list[Any]) -> list[Any]:
        """Returns those of `values` that are this text's."""
        first, *others = self._texts or [slice(0)]
        return values[first] + [value for other in others for value in values[other]]


class GivenWords(TokenRun):
    """The tokens of a text that was given as words. Those are its words, whatever MeCab makes of each."""

    __slots__ = ()

    def words(self) -> list[int]:
        """Returns the number of each token's word."""
        return [number for number, text in enumerate(self._texts) for _ in range(text.start, text.stop)]


class PlainEncoding:
    """An `Encoding` of one text that is not cut, with a token before and after it or none.

    The lists that most callers want are here; for all else it becomes an `Encoding`, which costs more than its ids.
    """

    n_sequences = 1
    overflowing: ClassVar[list[Encoding]] = []
    """What was cut off: nothing."""

    def __init__(self, run: TokenRun, around: tuple[int, int] | None, quoted: QuotedTokens) -> None:
        self._run, self._quoted = run, quoted
        self._around = int(around is not None)
        self._left = self._right = self._pad_type = 0
        self.ids = run.ids if around is None else [around[0], *run.ids, around[1]]

    def __len__(self) -> int:
        return len(self.ids)

    def pad(
        self, length: int, *, direction: str = "right", pad_id: int = 0, pad_type_id: int = 0, pad_token: str = "[PAD]"
    ) -> None:
        """See `tokenizers.Encoding.pad`; once at most."""
        missing = max(0, length - len(self.ids))
        self._left, self._right = (missing, 0) if direction == "left" else (0, missing)
        self._pad_type = pad_type_id
        self.ids = [pad_id] * self._left + self.ids + [pad_id] * self._right

    @property
    def type_ids(self) -> list[int]:
        """The number of each token's text."""
        return self._padded(0, [0] * len(self._run.ids), self._pad_type)

    @property
    def attention_mask(self) -> list[int]:
        """0 for padding."""
        return self._padded(1, [1] * len(self._run.ids), 0)

    @property
    def special_tokens_mask(self) -> list[int]:
        """1 for padding and the tokens around the text."""
        return self._padded(1, [0] * len(self._run.ids), 1)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and stop of each token in the text."""
        return self._padded((0, 0), self._run.offsets(), (0, 0))

    @functools.cached_property
    def whole(self) -> Encoding:
        """The `Encoding`."""
        start = self._left + self._around
        return self.as_library({"0": {"start": start, "end": start + len(self._run.ids)}})

    def as_library(self, ranges: Mapping[str, Any]) -> Encoding:
        """Returns the `Encoding`, with these `sequence_ranges`, from the JSON into which the library itself writes
        it."""
        tokens = ",".join(map(self._quoted.__getitem__, self.ids))
        words = str(self._padded(None, self._run.words(), None)).replace("None", "null")
        offsets = str(self.offsets).replace("(", "[").replace(")", "]")
        return _restored(
            f'{{"ids":{self.ids},"type_ids":{self.type_ids},"tokens":[{tokens}],"words":{words},"offsets":{offsets},'
            f'"special_tokens_mask":{self.special_tokens_mask},"attention_mask":{self.attention_mask},'
            f'"overflowing":[],"sequence_ranges":{json.dumps(ranges)}}}'.encode()
        )

    def _padded(self, around: Any, values: list[Any], padding: Any) -> list[Any]:
        whole = [around, *values, around] if self._around else values
        if self._left or self._right:
            return [padding] * self._left + whole + [padding] * self._right
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.whole.__getstate__(),)


class PlainEncodings(Sequence[PlainEncoding]):
    """The encodings of several texts, none of which is cut. Each is made when somebody asks for it; `column` gives the
    lists of all at once."""

    def __init__(self, encoded: EncodedTexts, around: tuple[int, int] | None, quoted: QuotedTokens) -> None:
        """`around` are the tokens before and after each text, and in `encoded`."""
        self._encoded, self._around, self._quoted = encoded, around, quoted
        self._padding: dict[str, Any] = {}
        self._ids = self._rows(encoded.ids)
        self.lengths = list(map(len, self._ids))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> PlainEncoding: ...

    @overload
    def __getitem__(self, index: slice) -> list[PlainEncoding]: ...

    def __getitem__(self, index: int | slice) -> PlainEncoding | list[PlainEncoding]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        encoding = PlainEncoding(TokenRun(self._encoded, numbers, numbers + 1), self._around, self._quoted)
        if self._padding:
            encoding.pad(**self._padding)
        return encoding

    def pad(self, length: int, **padding: Any) -> None:
        """See `PlainEncoding.pad`."""
        self._padding = {"length": length, **padding}

    def column(self, name: str) -> list[list[Any]]:
        """Returns the attribute `name` of each encoding."""
        if not self._padding:
            if name == "ids":
                return self._ids
            if name == "type_ids":
                return [[0] * length for length in self.lengths]
            if name == "attention_mask":
                return [[1] * length for length in self.lengths]
            if name == "offsets":
                return self._rows(self._encoded.offsets)
        return [getattr(each, name) for each in self]

    def _rows(self, values: list[Any]) -> list[list[Any]]:
        """Returns those of `values`, one for each token of all texts, that are each text's."""
        more = int(self._around is not None)
        edges = zip(self._encoded.firsts, self._encoded.lasts, strict=True)
        return [values[first - more : last + more] for first, last in edges]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _restored(state: bytes) -> Encoding:
    encoding = Encoding()
    encoding.__setstate__(state)
    return encoding
