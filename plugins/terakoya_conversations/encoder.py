"""Encodes conversations to ids, and marks every token that belongs to an answer.

The chat template renders a whole conversation, and the tokenizer encodes it at once, as Transformers does when the
model is used. The start and the end of an answer are known in characters. The ids of the text up to such a border are
compared with the ids of the whole text: the border is at the first difference. This works for any tokenizer; a token
that crosses a border belongs to the answer.

Letters: T tokens of all conversations, n tokens of one conversation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from terakoya.components import EncodedDocuments
from terakoya.components.tokenizer import encode_texts
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.documents import Reason
from terakoya.toolkit.tokenizers.line_encoder import special_tokens
from terakoya_conversations.chat_template import ChatTemplate, Span, TemplateError
from terakoya_conversations.conversations import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIKE_PROMPT = "conversations that begin with other ids than their prompts"
"""Name of the count of conversations in which the ids before an answer are not those of the prompt that the model gets
in use, because the template writes, or the tokenizer splits, a prompt differently when an answer follows."""

UNREAD = "conversations with a key that is not read: "
"""Beginning of the names of counts of conversations by key."""

_TEXTS = 512
"""Texts that are encoded at once."""


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text, the spans of its answers, and the prompt of each answer."""

    text: str
    spans: Sequence[Span]
    prompts: Sequence[str]


class ConversationEncoder:
    """Encodes the conversations in the documents of `terakoya_conversations.conversations`; belongs to one process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        """`vocabulary` is that of `tokenizer`, which the encoder changes for its own use.

        Raises UserError for a template that cannot be used.
        """
        self._renderer = template.create_renderer(tokenizer)
        self._tokenizer: Any = tokenizer
        self._tokenizer.model_max_length = 1 << 60  # nothing is truncated here, so no length needs a warning
        self._dtype = vocabulary.dtype()
        literal = sorted({str(token) for token in special_tokens(tokenizer)}, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literal)) or "(?!)")

    def encode(self, documents: Sequence[str]) -> EncodedDocuments:
        """Encodes `documents`; each conversation is one line of `line_lengths`."""
        literals: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        rejected: dict[int, Reason] = {}
        rendered: list[_Rendered | None] = []
        for number, text in enumerate(documents):
            conversation = Conversation(**orjson.loads(text))
            notes.update({f"{UNREAD}{key}" for key in conversation.unread})
            for turn in conversation.messages:
                literals.update(self._literal.findall("\n".join((turn["content"], turn.get("input", "")))))
            try:
                rendered.append(self._render(conversation))
            except TemplateError:
                rejected[number] = "refused by the template"
                rendered.append(None)
        ids: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        lengths = np.zeros(len(documents), np.int32)
        for number, (shown, rows) in enumerate(zip(rendered, self._ids(rendered), strict=True)):
            if shown is None:
                continue
            whole = rows[shown.text]
            marked = _answer_mask(shown, rows)
            if not marked.any():
                rejected[number] = "no answer in the template's text"
                continue
            prompts = [rows[prompt] for prompt in shown.prompts]
            notes[UNLIKE_PROMPT] += any(not np.array_equal(whole[: len(prompt)], prompt) for prompt in prompts)
            ids.append(whole)
            marks.append(marked)
            lengths[number] = len(whole)
        return EncodedDocuments(
            ids=np.concatenate([np.empty(0, self._dtype), *ids]),
            line_lengths=lengths[lengths > 0],
            document_lines=(lengths > 0).astype(np.int32),
            word_starts=None,
            literals=dict(literals),
            learned=np.concatenate([np.empty(0, bool), *marks]),
            rejected=rejected,
            notes={name: count for name, count in notes.items() if count},
        )

    def _render(self, conversation: Conversation) -> _Rendered:
        """Renders a conversation. Raises TemplateError."""
        turns = self._renderer.join_inputs(conversation.messages)
        text, marked = self._renderer.render(turns)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        prompts = [self._renderer.prompt(turns[:number]) for number in answers]
        if marked is not None:
            if conversation.context and len(marked) != len(answers):
                raise TemplateError(f"marks {len(marked)} spans of {len(answers)} answers, so none can be left out")
            if conversation.context:
                marked = [
                    span for span, number in zip(marked, answers, strict=True) if number not in conversation.context
                ]
            return _Rendered(text, [self._extend_to_end(text, span) for span in marked], prompts)
        spans = []
        for number, prompt in zip(answers, prompts, strict=True):
            if number in conversation.context:
                continue
            start = _common_length(prompt, text)
            last = number + 1 == len(turns)
            until = text if last else self._renderer.render(turns[: number + 1])[0]
            stop = _common_length(until, text)
            spans.append(self._until_end(text, (start, stop), turns[number]["content"]))
        return _Rendered(text, spans, prompts)

    def _extend_to_end(self, text: str, span: Span) -> Span:
        """Returns `span` of a marked answer, extended by the special token that follows it, unless it ends with one, or
        with white space after one."""
        start, stop = span
        end_of_text = start + len(text[start:stop].rstrip())
        if any(match.end() in (end_of_text, stop) for match in self._literal.finditer(text, start, stop)):
            return span
        end = self._literal.match(text, stop)
        return (start, end.end()) if end else span

    def _until_end(self, text: str, span: Span, content: str) -> Span:
        """Returns the span of a rendered answer up to and including the first special token after its `content`;
        without such a token, up to the white space at its end."""
        start, stop = span
        at = text.find(content.strip(), start, stop)
        after = start if at < 0 else at + len(content.strip())
        end = self._literal.search(text, after, stop)
        if end:
            return start, end.end()
        return start, max(after, start + len(text[start:stop].rstrip()))

    def _ids(self, rendered: Sequence[_Rendered | None]) -> list[dict[str, np.ndarray]]:
        """Returns for each conversation the ids of its text, of its prompts, and of its text up to each border."""
        texts_of = [
            {} if conversation is None else dict.fromkeys(_texts_to_encode(conversation)) for conversation in rendered
        ]
        texts = [text for text_set in texts_of for text in text_set]
        rows: list[np.ndarray] = []
        for start in range(0, len(texts), _TEXTS):
            encoded = encode_texts(self._call, texts[start : start + _TEXTS])
            rows += [np.array(row, self._dtype) for row in encoded]
        every = iter(rows)
        return [{text: next(every) for text in text_set} for text_set in texts_of]

    def _call(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each of `texts`."""
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids


def _common_length(first: str, second: str) -> int:
    """Returns the length of the common prefix of both texts."""
    if second.startswith(first):
        return len(first)
    return next(number for number, (a, b) in enumerate(zip(first, f"{second}\0", strict=False)) if a != b)


def _texts_to_encode(conversation: _Rendered) -> list[str]:
    borders = sorted({border for span in conversation.spans for border in span})
    return [conversation.text, *conversation.prompts, *(conversation.text[:border] for border in borders)]


def _answer_mask(conversation: _Rendered, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns (n,) bool: which tokens of the conversation belong to answers."""
    whole = rows[conversation.text]
    marks = np.zeros(len(whole), bool)
    for start, stop in conversation.spans:
        first, _ = _count_common(whole, rows[conversation.text[:start]])
        last, crossed = _count_common(whole, rows[conversation.text[:stop]])
        marks[first : last + crossed] = True
    return marks


def _count_common(whole: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """Returns how many tokens `whole` shares with `before`, the ids of the beginning of its text; and 1 if the next
    token crosses the border, else 0."""
    shared = min(len(whole), len(before))
    differs = np.flatnonzero(whole[:shared] != before[:shared])
    common = int(differs[0]) if len(differs) else shared
    return common, int(common < len(before))
