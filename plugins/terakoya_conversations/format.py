"""Conversations as a record format: `terakoya prepare --conversations`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terakoya.components import EncodedDocuments, Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.documents import Document, Reject
from terakoya.corpus.files import Source
from terakoya.errors import UserError
from terakoya.preparation.options import PrepareOptions
from terakoya.store.recorded_options import TEMPLATE_INPUT
from terakoya_conversations.chat_template import ChatTemplate, find_template
from terakoya_conversations.conversations import conversation_document
from terakoya_conversations.encoder import UNLIKE_PROMPT, UNREAD, ConversationEncoder

CHAT_TEMPLATE = "chat_template.jinja"
"""The file in a tokenizer's folder that Transformers prefers to the template in tokenizer_config.json."""

REMEDIES: Mapping[str, str] = {
    "not a conversation": 'lines are {"messages": [{"role", "content"}, ...]}, {"instruction", "input", "output"} or '
    '{"conversations": [{"from", "value"}, ...]}',
    "unknown role": "roles are system, user and assistant (in conversations: system, human and gpt)",
    "two questions in a row": "join them, or put an answer between them",
    "two answers in a row": "join them, or put a question between them",
    "history is not pairs of texts": 'earlier turns are [["question", "answer"], ...]',
    "no answer is learned": "leave out conversations whose answers all have weight 0 (train, training, loss: false)",
    "weight is not 0 or 1": "an answer is learned (1, true) or only read (0, false)",
    **dict.fromkeys(
        ("tools and their calls", "reasoning beside the answer", "images, video or sound"),
        "only text is read: write it into the content in the form that the model is to learn, or take the key out",
    ),
    "preferred and rejected answers": "write the answer that is to be learned as messages",
    "two forms of one example": "keep one of messages, conversations, and instruction with one input and one output",
    "refused by the template": "choose another --template",
}

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class ConversationFormat:
    """Implements `terakoya.components.record_format.RecordFormat` with a chat template."""

    template: ChatTemplate
    name: str = "conversations"
    remedies: Mapping[str, str] = field(default_factory=lambda: REMEDIES, compare=False)

    @property
    def recorded(self) -> Mapping[str, str]:
        """The template's name."""
        return {"template": self.template.name}

    @property
    def inputs(self) -> Mapping[str, str]:
        """The template's hash."""
        return {TEMPLATE_INPUT: self.template.fingerprint}

    @property
    def tokenizer_files(self) -> Mapping[str, str]:
        """The template."""
        return {CHAT_TEMPLATE: self.template.text}

    def read(self, file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
        return conversation_document(file, line, value, record)

    def encoder(
        self, tokenizer: Tokenizer, folder: Path, vocabulary: Vocabulary
    ) -> Callable[[Sequence[str]], EncodedDocuments]:
        return ConversationEncoder(tokenizer.load(folder), self.template, vocabulary).encode

    def tell(self, notes: Mapping[str, int], documents: int) -> None:
        if count := notes.get(UNLIKE_PROMPT):
            shown = (f"{count:,}", f"{documents:,}")
            logger.warning("%s of %s conversations begin with other ids than their prompts", *shown)
        if unread := {name.removeprefix(UNREAD): count for name, count in notes.items() if name.startswith(UNREAD)}:
            counts = ", ".join(f"{name} ({count:,})" for name, count in sorted(unread.items()))
            logger.warning("keys that are not read, and how many conversations have them: %s", counts)

    def tell_store(self, folder: Path, learned: float) -> None:
        written = folder / "tokenizer" / CHAT_TEMPLATE
        logger.info(
            "%.1f %% of the tokens belong to answers; template %s is in %s", 100 * learned, self.template.name, written
        )


def read_conversations(options: PrepareOptions, tokenizer: Tokenizer) -> ConversationFormat:
    """Returns the format with the template that `options` name. Raises UserError for options that conversations do not
    have, and as `find_template`."""
    if options.clean is not None or options.held_out:
        raise UserError(
            "--clean, --held-out: cleaning steps read plain text, conversations have turns; leave them out, and set "
            "conversations aside with data.split or `terakoya store split`"
        )
    if options.words is not None:
        raise UserError("--words: a conversation is learned token by token; leave it out with --conversations")
    if options.unit != "document":
        raise UserError(
            f"unit: a conversation is one sequence: expected document with --conversations, got {options.unit}"
        )
    if options.append_eos:
        raise UserError("--append-eos: the template ends each answer; leave the option out with --conversations")
    if (options.special_tokens_in_text or tokenizer.special_tokens_in_text) == "split":
        raise UserError(
            "--special-tokens-in-text split: a template's own special tokens are in the same text; expected parse or "
            "reject with --conversations"
        )
    return ConversationFormat(find_template(options.template, tokenizer.load(options.tokenizer), options.tokenizer))
