"""What stands behind the fast tokenizer in the place of the `tokenizers` library's: MeCab splits, the library does the
rest.

Truncation, overflow, pairs and padding are the library's, apart from texts that are neither cut nor paired, for which
that would cost as much as MeCab does: `PlainEncoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, processors

from terakoya_tokenizer.encodings import GivenWords, PlainEncoding, PlainEncodings, QuotedTokens, TokenRun
from terakoya_tokenizer.spans import EncodedTexts, SpanEncoder

Input = str | Sequence[str]


class MecabBackend:
    """A `tokenizers.Tokenizer`, of which `library` gives everything but the splitting of text."""

    def __init__(self, library: Tokenizer, build: Callable[[Mapping[int, AddedToken]], SpanEncoder]) -> None:
        """`build` makes the encoder from the added tokens, when the first text comes and again after one was added."""
        self._library, self._build = library, build
        self._spans: SpanEncoder | None = None
        self._around: tuple[int, int] | None = None
        self._quoted = QuotedTokens(library.id_to_token)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_library":  # while it is copied it has no library yet
            raise AttributeError(name)
        return getattr(self._library, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            if name == "post_processor":  # another one than that of `surround`
                self._around = None
            setattr(self._library, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """MeCab's state is left out: each process makes its own."""
        return {"library": self._library, "build": self._build, "around": self._around}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["library"], state["build"])  # type: ignore[misc]
        self._around = state["around"]

    def add_tokens(self, tokens: list[Any]) -> int:
        """See `tokenizers.Tokenizer.add_tokens`."""
        self._spans = None
        added: int = self._library.add_tokens(tokens)
        return added

    def add_special_tokens(self, tokens: list[Any]) -> int:
        """See `tokenizers.Tokenizer.add_special_tokens`."""
        self._spans = None
        added: int = self._library.add_special_tokens(tokens)
        return added

    def surround(self, before: int, after: int) -> None:
        """Puts the tokens with these ids around a text, and around and between the texts of a pair."""
        names = [self._library.id_to_token(id) for id in (before, after)]
        self._library.post_processor = processors.TemplateProcessing(
            single=f"{names[0]}:0 $A:0 {names[1]}:0",
            pair=f"{names[0]}:0 $A:0 {names[1]}:0 $B:1 {names[1]}:1",
            special_tokens=[(names[0], before), (names[1], after)],
        )
        self._around = (before, after)

    def encode(
        self, sequence: Any, pair: Any = None, is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> Encoding:
        """See `tokenizers.Tokenizer.encode`."""
        inputs = [sequence] if pair is None else [(sequence, pair)]
        (encoding,) = self.encode_batch(inputs, is_pretokenized, add_special_tokens)
        return encoding.whole if isinstance(encoding, PlainEncoding) else encoding

    def encode_batch(
        self, input: Sequence[Any], is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> list[Any]:
        """See `tokenizers.Tokenizer.encode_batch`. Words that are given (`is_pretokenized`) are split further, and are
        the words of `Encoding.word_ids`."""
        if not is_pretokenized and all(isinstance(each, str) for each in input):
            return list(self.encode_texts(input, add_special_tokens))
        samples = [_sequences(each, is_pretokenized) for each in input]
        runs = iter(self._runs([sequence for sample in samples for sequence in sample]))
        encodings = []
        for sample in samples:
            first = next(runs)
            encodings.append(self._encoding(first, next(runs) if len(sample) == 2 else None, add_special_tokens))
        self._pad(encodings)
        return encodings

    encode_batch_fast = encode_batch

    def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> PlainEncodings | list[Any]:
        """See `encode_batch`; `texts` are neither pairs nor words."""
        encoded = self._encoded(texts)
        encodings: PlainEncodings | list[Any]
        if self._is_plain(max(map(int.__sub__, encoded.lasts, encoded.firsts), default=0), add_special_tokens):
            encodings = PlainEncodings(encoded, self._around if add_special_tokens else None, self._quoted)
        else:
            runs = (TokenRun(encoded, number, number + 1) for number in range(len(texts)))
            encodings = [self._encoding(run, None, add_special_tokens) for run in runs]
        self._pad(encodings)
        return encodings

    def _encoding(self, run: TokenRun, pair: TokenRun | None, add_special_tokens: bool) -> Any:
        """Returns the encoding of a text or of a pair, cut but not padded."""
        if pair is None and self._is_plain(len(run.ids), add_special_tokens):
            return PlainEncoding(run, self._around if add_special_tokens else None, self._quoted)
        second = pair.encoding(self._quoted) if pair is not None else None
        return self._library.post_process(run.encoding(self._quoted), second, add_special_tokens)

    def _is_plain(self, length: int, add_special_tokens: bool) -> bool:
        """Returns whether a text of `length` tokens is neither cut nor surrounded by other tokens than those of
        `surround`."""
        truncation = self._library.truncation
        if add_special_tokens and self._around is None:
            return False
        return truncation is None or length + 2 * add_special_tokens <= truncation["max_length"]

    def _encoded(self, texts: Sequence[str]) -> EncodedTexts:
        if self._spans is None:
            self._spans = self._build(self._library.get_added_tokens_decoder())
        around = self._around or (0, 0)
        return self._spans.encode(texts, around=around, added_tokens=not self._library.encode_special_tokens)

    def _runs(self, sequences: Sequence[Input]) -> list[TokenRun]:
        """Returns the tokens of each sequence, a text or words."""
        encoded = self._encoded([text for each in sequences for text in ([each] if isinstance(each, str) else each)])
        runs: list[TokenRun] = []
        first = 0
        for each in sequences:
            last = first + (1 if isinstance(each, str) else len(each))
            runs.append((TokenRun if isinstance(each, str) else GivenWords)(encoded, first, last))
            first = last
        return runs

    def _pad(self, encodings: PlainEncodings | list[Any]) -> None:
        """Pads as the library's batches are padded: to a length, or to the longest of `encodings`."""
        padding = self._library.padding
        if padding is None:
            return
        lengths = encodings.lengths if isinstance(encodings, PlainEncodings) else map(len, encodings)
        length = padding["length"] or max(lengths, default=0)
        multiple = padding["pad_to_multiple_of"]
        if multiple:
            length += -length % multiple
        for each in [encodings] if isinstance(encodings, PlainEncodings) else encodings:
            each.pad(
                length,
                direction=padding["direction"],
                pad_id=padding["pad_id"],
                pad_type_id=padding["pad_type_id"],
                pad_token=padding["pad_token"],
            )


def _sequences(sample: Any, is_pretokenized: bool) -> Sequence[Input]:
    """Returns the one or two sequences of a sample."""
    if isinstance(sample, str) or (is_pretokenized and all(isinstance(word, str) for word in sample)):
        return [sample]
    if len(sample) != 2:
        raise TypeError(f"expected a text or a pair of them, got {len(sample)} of them")
    return list(sample)
