"""Conversations as they lie in jsonl: three shapes of a line, told apart by their keys, become one.

`{"messages": [{"role", "content"}, ...]}`; `{"instruction", "input", "output"}`, as Alpaca has it, or `{"instruction",
"context", "response"}`, as Dolly has it; `{"conversations": [{"from", "value"}, ...]}`, as ShareGPT has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import orjson

from terakoya.corpus.documents import Document, Reason, Reject, reject_bytes
from terakoya.corpus.files import Source

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`; of a user also `input`, what the instruction is about."""

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")


class InvalidConversationError(Exception):
    """Why a line is no conversation to learn from."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def conversation_document(file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
    """Returns the conversation in the JSON object `value`, whose line is `record`, as a document or a reject.

    `read_messages` reads the document's text.
    """
    try:
        found = read_conversation(value)
    except InvalidConversationError as error:
        return reject_bytes(file, line, error.reason, record)
    return Document(orjson.dumps(found).decode(), file, line)


def read_messages(text: str) -> list[Message]:
    """The messages of a document that `conversation_document` made."""
    found: list[Message] = orjson.loads(text)
    return found


def read_conversation(value: Mapping[str, Any]) -> list[Message]:
    """The messages of one object: perhaps a system message, then users and answers in turn.

    Raises:
        InvalidConversationError: other keys, roles or orders, an empty message, one that is not text, or no answer.
    """
    if "messages" in value:
        found = [_message(each, "role", "content") for each in _listed(value["messages"])]
    elif "conversations" in value:
        found = [_message(each, "from", "value") for each in _listed(value["conversations"])]
    elif "instruction" in value and any(name in value for name in _OUTPUTS):
        found = _instruction(value)
    else:
        raise InvalidConversationError("not a conversation")
    if (system := value.get("system")) and "system" not in [each["role"] for each in found]:
        found = [{"role": "system", "content": _text(system)}, *found]
    _check_order([each["role"] for each in found])
    return found


def _listed(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise InvalidConversationError("not a conversation")
    return value


def _message(value: object, role_key: str, content_key: str) -> Message:
    if not isinstance(value, dict) or role_key not in value or content_key not in value:
        raise InvalidConversationError("not a conversation")
    role = value[role_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidConversationError("unknown role")
    return {"role": _ROLES[role], "content": _text(value[content_key])}


def _instruction(value: Mapping[str, Any]) -> list[Message]:
    question = {"role": "user", "content": _text(value["instruction"])}
    about = next((value[name] for name in _INPUTS if value.get(name)), "")
    if not isinstance(about, str):
        raise InvalidConversationError("message is not a string")
    if about.strip():
        question["input"] = about
    answer = next(value[name] for name in _OUTPUTS if name in value)
    return [question, {"role": "assistant", "content": _text(answer)}]


def _text(value: object) -> str:
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
