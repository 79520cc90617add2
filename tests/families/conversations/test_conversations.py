"""Three formats of conversations are read alike; invalid conversations are rejected with their line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest
from chat_tokenizer import MESSAGES, WITH_INPUT, write_lines

from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya_conversations.chat_template import ChatTemplate
from terakoya_conversations.conversations import Conversation, InvalidConversationError, read_conversation
from terakoya_conversations.format import ConversationFormat

USER, ANSWER = {"role": "user", "content": "問い"}, {"role": "assistant", "content": "答え"}
SYSTEM = {"role": "system", "content": "丁寧に。"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER], "id": 7}, [USER, ANSWER]),
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
        ({"instruction": "問い", "output": "答え"}, [USER, ANSWER]),
        ({"instruction": "問い", "input": "", "output": "答え"}, [USER, ANSWER]),
        ({"instruction": "問い", "input": "材料", "output": "答え"}, [{**USER, "input": "材料"}, ANSWER]),
        ({"instruction": "問い", "context": "材料", "response": "答え"}, [{**USER, "input": "材料"}, ANSWER]),
        ({"instruction": "問い", "output": "答え", "system": "丁寧に。"}, [SYSTEM, USER, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "問い"}, {"from": "gpt", "value": "答え"}]},
            [USER, ANSWER],
        ),
        (
            {"conversations": [{"from": "system", "value": "丁寧に。"}, {"from": "human", "value": "問い"},
                               {"from": "gpt", "value": "答え"}], "system": "別の"},
            [SYSTEM, USER, ANSWER],
        ),
    ],
)  # fmt: skip
def test_formats_are_distinguished_by_their_keys(record: dict[str, Any], expected: list[dict[str, str]]) -> None:
    assert read_conversation(record).messages == expected


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "文"}, "not a conversation"),
        ({"instruction": "問い"}, "not a conversation"),
        ({"messages": "文"}, "not a conversation"),
        ({"messages": [{"role": "user"}]}, "not a conversation"),
        ({"messages": []}, "not a conversation"),
        ({"messages": [USER]}, "no answer"),
        ({"messages": [SYSTEM, USER]}, "no answer"),
        ({"messages": [ANSWER]}, "answer without a question"),
        ({"messages": [SYSTEM, ANSWER, USER, ANSWER]}, "answer without a question"),
        ({"messages": [USER, USER, ANSWER]}, "two questions in a row"),
        ({"messages": [USER, ANSWER, ANSWER]}, "two answers in a row"),
        ({"messages": [USER, SYSTEM, ANSWER]}, "system message not at the beginning"),
        ({"messages": [{**USER, "role": "tool"}, ANSWER]}, "unknown role"),
        ({"messages": [{**USER, "role": 3}, ANSWER]}, "unknown role"),
        ({"messages": [{**USER, "content": "\n　"}, ANSWER]}, "empty message"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "message is not a string"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "問い"}]}, ANSWER]}, "message is not a string"),
        ({"instruction": "問い", "input": ["a"], "output": "答え"}, "message is not a string"),
        ({"instruction": "問い", "output": " "}, "empty message"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "tools and their calls"),
        ({"messages": [USER, {**ANSWER, "content": None, "tool_calls": [{"name": "f"}]}]}, "tools and their calls"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "まず"}]}, "reasoning beside the answer"),
        ({"instruction": "問い", "output": "答え", "images": ["a.png"]}, "images, video or sound"),
        (
            {"conversations": [{"from": "human", "value": "問い"}], "chosen": {}, "rejected": {"value": "答え"}},
            "preferred and rejected answers",
        ),
        (
            {"messages": [USER, ANSWER], "conversations": [{"from": "human", "value": "別の"}]},
            "two forms of one example",
        ),
        ({"messages": [USER, ANSWER], "history": [["前の", "答え"]]}, "two forms of one example"),
        ({"instruction": "問い", "output": "答え", "response": "別の"}, "two forms of one example"),
        ({"instruction": "問い", "output": "答え", "history": ["前の"]}, "history is not pairs of texts"),
    ],
)
def test_invalid_conversations_are_rejected_with_the_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConversationError) as error:
        read_conversation(record)
    assert error.value.reason == reason


FORMAT = ConversationFormat(ChatTemplate("x", ""))


def test_a_corpus_gives_conversations_and_rejects_with_their_lines(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl", {"messages": MESSAGES}, "no JSON", '["list"]', "", WITH_INPUT, {"messages": [USER]}
    )
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for file in ("a.jsonl", "a.jsonl.gz"):
        corpus = Corpus(find_files([tmp_path / file]), records=FORMAT, block_bytes=100)
        items = [item for block in corpus.blocks() for item in corpus.read(block)]
        found = [
            (item.line, Conversation(**orjson.loads(item.text)).messages)
            for item in items
            if isinstance(item, Document)
        ]
        question = {"role": "user", "content": WITH_INPUT["instruction"], "input": WITH_INPUT["input"]}
        assert found == [(1, MESSAGES), (5, [question, {"role": "assistant", "content": WITH_INPUT["output"]}])]
        rejects = [(item.line, item.reason) for item in items if isinstance(item, Reject)]
        assert rejects == [(2, "bad JSON"), (3, "not a JSON object"), (6, "no answer")]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("文")
    with pytest.raises(UserError, match=r"a\.txt: conversations: expected a jsonl file"):
        Corpus(find_files([tmp_path / "a.txt"]), records=FORMAT)
