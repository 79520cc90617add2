"""Conversations in jsonl files: three formats of a line, distinguished by their keys, are read into one.

`{"messages": [{"role", "content"}, ...]}`; `{"instruction", "input", "output"}`, as in Alpaca, or `{"instruction",
"context", "response"}`, as in Dolly; `{"conversations": [{"from", "value"}, ...]}`, as in ShareGPT. What happens to all
other keys is in `keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import orjson

from terakoya.corpus.documents import Document, Reason, Reject, reject_bytes
from terakoya.corpus.files import Source
from terakoya.corpus.known_keys import RefusedKeyError
from terakoya_conversations.keys import KNOWN, LEARNED_FLAGS

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`; a user message may have `input`, the text to work on."""


@dataclass(frozen=True)
class Conversation:
    """What a line holds.

    Attributes:
        messages: an optional system message, then users and answers in turn.
        context: the numbers of the answers that are read and not learned.
        unread: keys of the line that hold something and are not read.
    """

    messages: Sequence[Message]
    context: Sequence[int] = ()
    unread: Sequence[str] = ()


_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_Turns = list[tuple[Message, Mapping[str, bool]]]
"""Messages with their `LEARNED_FLAGS`."""
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")


class InvalidConversationError(Exception):
    """A line is not a conversation that a model can be trained on; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def conversation_document(file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
    """Returns the conversation in the JSON object `value`, whose line is `record`, as a document or a reject.

    `Conversation(**orjson.loads(text))` reads the document's text.
    """
    try:
        conversation = read_conversation(value)
    except InvalidConversationError as error:
        return reject_bytes(file, line, error.reason, record)
    return Document(orjson.dumps(asdict(conversation)).decode(), file, line)


def read_conversation(value: Mapping[str, Any]) -> Conversation:
    """Returns the conversation in one object.

    Raises:
        InvalidConversationError: other keys, roles or orders, an empty message, one that is not text, a key that would
            change what is learned, or no answer that is learned.
    """
    turns: _Turns
    if value.get("messages"):
        turns, unread = _list_turns(value, "messages", "message", "role", "content")
    elif value.get("conversations"):
        turns, unread = _list_turns(value, "conversations", "turn", "from", "value")
    elif "instruction" in value and any(name in value for name in _OUTPUTS):
        unread = _unread("instruction", value)
        turns = [(message, {}) for message in _earlier_messages(value.get("history") or [])]
        turns += zip(_instruction_messages(value), ({}, _flags(value)), strict=True)
    else:
        raise InvalidConversationError("not a conversation")
    if system := value.get("system"):
        if "system" in [message["role"] for message, _ in turns]:
            unread.append("system")
        else:
            turns.insert(0, ({"role": "system", "content": _require_text(system)}, {}))
    messages = [message for message, _ in turns]
    _check_order([message["role"] for message in messages])
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    context = [number for number in answers if not all(turns[number][1].values())]
    if context == answers:
        raise InvalidConversationError("no answer is learned")
    return Conversation(messages, context, unread)


def _list_turns(value: Mapping[str, Any], form: str, part: str, role: str, content: str) -> tuple[_Turns, list[str]]:
    """Returns the messages below the key `form` of a line, and the keys that are not read."""
    turns: _Turns = []
    unread = _unread(form, value)
    for item in _require_list(value[form]):
        if not isinstance(item, dict):
            raise InvalidConversationError("not a conversation")
        others, flags = _unread(part, item), _flags(item)
        message = _message(item, role, content)
        if message["role"] != "assistant":
            others += [flag for flag in flags if flags[flag]]
        unread += [f"{form}[].{key}" for key in others]
        turns.append((message, flags))
    return turns, unread


def _unread(kind: str, value: Mapping[str, Any]) -> list[str]:
    try:
        return KNOWN[kind].unread(value)
    except RefusedKeyError as error:
        raise InvalidConversationError(error.reason) from None


def _flags(value: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the `LEARNED_FLAGS` that `value` has."""
    found = {key: value[key] for key in LEARNED_FLAGS if value.get(key) is not None}
    if any(flag not in (0, 1) for flag in found.values()):
        raise InvalidConversationError("weight is not 0 or 1")
    return {key: bool(flag) for key, flag in found.items()}


def _require_list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise InvalidConversationError("not a conversation")
    return value


def _message(value: Mapping[str, Any], role_key: str, content_key: str) -> Message:
    if role_key not in value or content_key not in value:
        raise InvalidConversationError("not a conversation")
    role = value[role_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidConversationError("unknown role")
    return {"role": _ROLES[role], "content": _require_text(value[content_key])}


def _earlier_messages(history: object) -> list[Message]:
    """Returns the questions and answers of LLaMA-Factory's `history`."""
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise InvalidConversationError("history is not pairs of texts")
    return [
        {"role": role, "content": _require_text(text)}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _instruction_messages(value: Mapping[str, Any]) -> list[Message]:
    question = {"role": "user", "content": _require_text(value["instruction"])}
    given = next((value[name] for name in _INPUTS if value.get(name)), "")
    if not isinstance(given, str):
        raise InvalidConversationError("message is not a string")
    if given.strip():
        question["input"] = given
    answer = next(value[name] for name in _OUTPUTS if name in value)
    return [question, {"role": "assistant", "content": _require_text(answer)}]


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidConversationError("message is not a string")
    if not value.strip():
        raise InvalidConversationError("empty message")
    return value


def _check_order(roles: Sequence[str]) -> None:
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in turns:
        raise InvalidConversationError("system message not at the beginning")
    if "assistant" not in turns:
        raise InvalidConversationError("no answer")
    if turns[0] == "assistant":
        raise InvalidConversationError("answer without a question")
    for role, following in pairwise(turns):
        if role == following:
            raise InvalidConversationError("two questions in a row" if role == "user" else "two answers in a row")
