"""Conversations in jsonl files: three formats of a line, distinguished by their keys, are read into one.

`{"messages": [{"role", "content"}, ...]}`; `{"instruction", "input", "output"}`, as in Alpaca, or `{"instruction",
"context", "response"}`, as in Dolly; `{"conversations": [{"from", "value"}, ...]}`, as in ShareGPT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import orjson

from terakoya.corpus.documents import Document, Reason, Reject, reject_bytes
from terakoya.corpus.files import Source

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`; a user message may have `input`, the text to work on."""

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")


class InvalidConversationError(Exception):
    """A line is not a conversation that a model can be trained on; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def conversation_document(file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
    """Returns the conversation in the JSON object `value`, whose line is `record`, as a document or a reject.

    `read_messages` reads the document's text.
    """
    try:
        messages = read_conversation(value)
    except InvalidConversationError as error:
        return reject_bytes(file, line, error.reason, record)
    return Document(orjson.dumps(messages).decode(), file, line)


def read_messages(text: str) -> list[Message]:
    """Returns the messages in the text of a document from `conversation_document`."""
    messages: list[Message] = orjson.loads(text)
    return messages


def read_conversation(value: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of one object: an optional system message, then users and answers in turn.

    Raises:
        InvalidConversationError: other keys, roles or orders, an empty message, one that is not text, or no answer.
    """
    if "messages" in value:
        messages = [_message(item, "role", "content") for item in _require_list(value["messages"])]
    elif "conversations" in value:
        messages = [_message(item, "from", "value") for item in _require_list(value["conversations"])]
    elif "instruction" in value and any(name in value for name in _OUTPUTS):
        messages = _instruction_messages(value)
    else:
        raise InvalidConversationError("not a conversation")
    if (system := value.get("system")) and "system" not in [message["role"] for message in messages]:
        messages = [{"role": "system", "content": _require_text(system)}, *messages]
    _check_order([message["role"] for message in messages])
    return messages


def _require_list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise InvalidConversationError("not a conversation")
    return value


def _message(value: object, role_key: str, content_key: str) -> Message:
    if not isinstance(value, dict) or role_key not in value or content_key not in value:
        raise InvalidConversationError("not a conversation")
    role = value[role_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidConversationError("unknown role")
    return {"role": _ROLES[role], "content": _require_text(value[content_key])}


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
