"""Conversations to ids, with a mark on every token that belongs to an answer.

A conversation is rendered by its chat template and made into ids whole, as Transformers does when the model is used.
Where an answer begins and ends is known in characters; the ids of the text up to such a border are compared with those
of the whole, and the border lies where the two part. That works for any tokenizer; a token on both sides of a border
belongs to the answer.

Letters: T tokens of all conversations, n tokens of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from terakoya.components import Encoded
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.conversations import Message, read_messages
from terakoya.corpus.documents import Reason
from terakoya.preparation.chat_template import ChatTemplate, Span, TemplateError
from terakoya.toolkit.tokenizers.line_encoder import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIKE_PROMPT = "conversations that begin with other ids than their prompts"
"""The note that counts conversations in which training sees other ids before an answer than the model is given when it
is used, because the template writes, or the tokenizer cuts, a prompt differently where an answer follows."""

_TEXTS = 512
"""Texts that are made into ids at once."""


@dataclass(frozen=True)
class EncodedConversations(Encoded):
    """Conversations as ids; of those that are left out no token is here.

    Attributes:
        answers: (T,) bool, True where a token belongs to an answer, its end included.
        rejected: why conversations were left out, by their number in the batch.
        notes: what else was counted.
    """

    answers: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    rejected: Mapping[int, Reason] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text, where its answers lie in it, and what stands before each when the model is asked."""

    text: str
    spans: Sequence[Span]
    prompts: Sequence[str]


class ConversationEncoder:
    """Encodes what `terakoya.corpus.conversations.read_messages` reads; belongs to one process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        """`vocabulary` is that of `tokenizer`, which from here on is the encoder's own.

        Raises UserError for a template that cannot be used.
        """
        self._renderer = template.create_renderer(tokenizer)
        self._tokenizer: Any = tokenizer
        self._tokenizer.model_max_length = 1 << 60  # nothing is cut here, so nothing is too long
        self._dtype = vocabulary.dtype()
        literal = sorted({str(token) for token in special_tokens(tokenizer)}, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literal)) or "(?!)")

    def encode(self, documents: Sequence[str]) -> EncodedConversations:
        """The ids of `documents`, each one line of `line_lengths`."""
        literals: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        rejected: dict[int, Reason] = {}
        rendered: list[_Rendered | None] = []
        for number, text in enumerate(documents):
            turns = read_messages(text)
            for turn in turns:
                literals.update(self._literal.findall("\n".join((turn["content"], turn.get("input", "")))))
            try:
                rendered.append(self._render(turns))
            except TemplateError:
                rejected[number] = "refused by the template"
                rendered.append(None)
        ids: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        lengths = np.zeros(len(documents), np.int32)
        for number, (one, rows) in enumerate(zip(rendered, self._ids(rendered), strict=True)):
            if one is None:
                continue
            whole = rows[one.text]
            marked = _answer_mask(one, rows)
            if not marked.any():
                rejected[number] = "no answer in the template's text"
                continue
            prompts = [rows[prompt] for prompt in one.prompts]
            notes[UNLIKE_PROMPT] += any(not np.array_equal(whole[: len(each)], each) for each in prompts)
            ids.append(whole)
            marks.append(marked)
            lengths[number] = len(whole)
        return EncodedConversations(
            ids=np.concatenate([np.empty(0, self._dtype), *ids]),
            line_lengths=lengths[lengths > 0],
            document_lines=(lengths > 0).astype(np.int32),
            word_starts=None,
            literals=dict(literals),
            answers=np.concatenate([np.empty(0, bool), *marks]),
            rejected=rejected,
            notes={name: count for name, count in notes.items() if count},
        )

    def _render(self, turns: Sequence[Message]) -> _Rendered:
        """The text of a conversation. Raises TemplateError."""
        turns = self._renderer.join_inputs(turns)
        text, marked = self._renderer.render(turns)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        prompts = [self._renderer.prompt(turns[:number]) for number in answers]
        if marked is not None:
            return _Rendered(text, [self._with_end(text, span) for span in marked], prompts)
        spans = []
        for number, prompt in zip(answers, prompts, strict=True):
            start = _common_length(prompt, text)
            last = number + 1 == len(turns)
            until = text if last else self._renderer.render(turns[: number + 1])[0]
            stop = _common_length(until, text)
            spans.append(self._until_end(text, (start, stop), turns[number]["content"]))
        return _Rendered(text, spans, prompts)

    def _with_end(self, text: str, span: Span) -> Span:
        """A marked answer together with the special token right behind it, unless it ends with one."""
        start, stop = span
        if any(found.end() == stop for found in self._literal.finditer(text, start, stop)):
            return span
        end = self._literal.match(text, stop)
        return (start, end.end()) if end else span

    def _until_end(self, text: str, span: Span, content: str) -> Span:
        """What was rendered for an answer, up to the first special token behind its `content`, that included; where
        there is none, without white space at its end."""
        start, stop = span
        found = text.find(content.strip(), start, stop)
        after = start if found < 0 else found + len(content.strip())
        end = self._literal.search(text, after, stop)
        if end:
            return start, end.end()
        return start, max(after, start + len(text[start:stop].rstrip()))

    def _ids(self, rendered: Sequence[_Rendered | None]) -> list[dict[str, np.ndarray]]:
        """For each conversation the ids of its text, of its prompts, and of its text up to each border."""
        wanted = [{} if one is None else dict.fromkeys(_texts_to_encode(one)) for one in rendered]
        texts = [text for each in wanted for text in each]
        rows: list[np.ndarray] = []
        for start in range(0, len(texts), _TEXTS):
            found = self._tokenizer(texts[start : start + _TEXTS], add_special_tokens=False)["input_ids"]
            rows += [np.array(row, self._dtype) for row in found]
        every = iter(rows)
        return [{text: next(every) for text in each} for each in wanted]


def _common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    if other.startswith(one):
        return len(one)
    return next(number for number, (a, b) in enumerate(zip(one, f"{other}\0", strict=False)) if a != b)


def _texts_to_encode(one: _Rendered) -> list[str]:
    borders = sorted({border for span in one.spans for border in span})
    return [one.text, *one.prompts, *(one.text[:border] for border in borders)]


def _answer_mask(one: _Rendered, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """(n,) bool: which tokens of the conversation belong to answers."""
    whole = rows[one.text]
    marks = np.zeros(len(whole), bool)
    for start, stop in one.spans:
        first, _ = _count_common(whole, rows[one.text[:start]])
        last, crossed = _count_common(whole, rows[one.text[:stop]])
        marks[first : last + crossed] = True
    return marks


def _count_common(whole: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """How many tokens `whole` has in common with the beginning `before` of its text; and 1 if the next one crosses the
    border, else 0."""
    shared = min(len(whole), len(before))
    differs = np.flatnonzero(whole[:shared] != before[:shared])
    common = int(differs[0]) if len(differs) else shared
    return common, int(common < len(before))
