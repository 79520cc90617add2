"""Every key that a reader of examples knows changes what is trained, is refused, or means nothing; others are told."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from terakoya.corpus.known_keys import HARMLESS
from terakoya.errors import UserError
from terakoya_conversations import keys
from terakoya_conversations.conversations import InvalidConversationError, read_conversation
from terakoya_quality.finetuning import known_keys
from terakoya_quality.finetuning.answers import Answers
from terakoya_quality.finetuning.choices import MultipleChoice
from terakoya_quality.finetuning.entities import NamedEntities
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import Task
from terakoya_quality.finetuning.texts import Classification

KNOWN = {**keys.KNOWN, **known_keys.KNOWN}
Read = Callable[[Mapping[str, Any]], Any]
REFUSED: Any = object()
"""What is read of an example that is refused."""


def converse(value: Mapping[str, Any]) -> Any:
    """Returns what `prepare` learns from a line, and the keys that it tells."""
    try:
        found = read_conversation(value)
    except InvalidConversationError:
        return REFUSED
    return (found.messages, found.context), tuple(found.unread)


def examples_of(kind: type[Task[Any]], *others: Mapping[str, Any]) -> Read:
    def read(value: Mapping[str, Any]) -> Any:
        """Returns what `finetune` learns from a row, and what it tells."""
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("terakoya")
        before = logger.level
        logger.setLevel(logging.INFO)
        try:
            task = kind([Row("a, line 1", each) for each in (value, *others)])
            logger.addHandler(handler)  # after the line about labels
            found = task.read([Row("a, line 1", value)])
        except UserError:
            return REFUSED
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
        return found, tuple(said)

    return read


TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
OFF: dict[str, Any] = {"weight": 0, "train": False, "training": False, "loss": 0.0}
SPANS = {"text": "x 東京", "spans": [{"start": 2, "end": 4, "label": "A"}]}
ASKED = {"question": "a", "context": "b c b", "answers": [{"text": "b", "answer_start": 0}]}
CHOICE = {"question": "a", "choice0": "b", "choice1": "c", "label": 0}

CASES: Mapping[str, tuple[Read, dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    # kind: how an example is read, an example, another value for each key that is read, where the object is in it
    "messages": (converse, {"messages": MESSAGES}, {"messages": MESSAGES[:2], "system": "s"}, lambda value: value),
    "conversations": (
        converse,
        {"conversations": [{"from": role, "value": text} for role, text in TURNS]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"},
        lambda value: value,
    ),
    "instruction": (
        converse,
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        {"instruction": "x", "input": "x", "context": "x", "output": "x", "response": "x", "system": "s",
         "history": [["x", "y"]], **OFF},
        lambda value: value,
    ),
    "message": (
        converse, {"messages": MESSAGES}, {"role": "user", "content": "x", **OFF}, lambda value: value["messages"][1]
    ),
    "turn": (
        converse,
        {"conversations": [{"from": role, "value": text} for role, text in TURNS]},
        {"from": "human", "value": "x", **OFF},
        lambda value: value["conversations"][1],
    ),
    "text": (
        examples_of(Classification, {"text": "b", "label": 1}), {"text": "a", "label": 0}, {"text": "x", "label": 1},
        lambda value: value,
    ),
    "pair": (
        examples_of(Classification, {"text1": "b", "text2": "c", "label": 1}),
        {"text1": "a", "text2": "b", "label": 0}, {"text1": "x", "text2": "x", "label": 1}, lambda value: value,
    ),
    "choice": (
        examples_of(MultipleChoice), CHOICE,
        {"question": "x", "choices": ["x", "y"], r"choice\d+": "x", "label": 1}, lambda value: value,
    ),
    "tagged words": (
        examples_of(NamedEntities), {"tokens": ["a", "b"], "tags": ["B-A", "O"]},
        {"tokens": ["x", "b"], "tags": ["O", "B-A"]}, lambda value: value,
    ),
    "spans": (
        examples_of(NamedEntities), SPANS, {"text": "x 大阪", "spans": [{"start": 2, "end": 3, "label": "A"}]},
        lambda value: value,
    ),
    "span": (
        examples_of(NamedEntities), SPANS,
        {"span": [0, 2], "start": 0, "end": 3, "label": "B", "type": "B", "text": "大阪", "name": "大阪"},
        lambda value: value["spans"][0],
    ),
    "asked text": (
        examples_of(Answers), ASKED,
        {"question": "x", "context": "b c", "answers": [{"text": "c", "answer_start": 2}]}, lambda value: value,
    ),
    "answer": (
        examples_of(Answers), ASKED, {"text": "b c", "answer_start": 4}, lambda value: value["answers"][0],
    ),
}  # fmt: skip


def test_every_kind_of_object_is_tried() -> None:
    tasks = {kind for task in KINDS.values() for _, kind in (*task.forms, *task.parts)}
    assert set(CASES) == set(KNOWN) == {"messages", "conversations", "instruction", "message", "turn"} | tasks


@pytest.mark.parametrize("kind", CASES)
def test_a_changed_key_changes_what_is_trained_or_the_command_speaks(kind: str) -> None:
    read, example, changes, find = CASES[kind]
    keys, before = KNOWN[kind], read(example)
    assert before is not REFUSED and before[1] == ()

    def with_key(key: str, value: Any) -> Any:
        changed = copy.deepcopy(example)
        find(changed)[key] = value
        return read(changed)

    assert set(changes) == set(keys.read.split())
    for key, value in changes.items():
        assert with_key(key.replace(r"\d+", "0"), value) != before, key
    for key in keys.refused_keys:
        assert with_key(key, "x") is REFUSED, key
        nothing = next(iter(sorted(keys.defaults.get(key, {""}))))
        assert with_key(key, nothing) == before, key
    for key in f"{HARMLESS} {keys.harmless}".split():
        if key not in keys.read.split():
            assert with_key(key, "x") == before, key
    found, told = with_key("mystery", "x")
    assert found == before[0] and any("mystery" in each for each in told)


@pytest.mark.parametrize("flag", OFF)
def test_an_answer_that_is_switched_off_is_context(flag: str) -> None:
    answer = MESSAGES[1]
    found = read_conversation({"messages": [MESSAGES[0], {**answer, flag: OFF[flag]}, *MESSAGES[2:]]})
    assert found.messages == MESSAGES and found.context == [1] and found.unread == []
    assert read_conversation({"messages": [MESSAGES[0], {**answer, flag: 1}]}).context == []
    assert read_conversation({"messages": [{**MESSAGES[0], flag: True}, answer]}).unread == [f"messages[].{flag}"]
    with pytest.raises(InvalidConversationError, match="no answer is learned"):
        read_conversation({"instruction": "a", "output": "b", flag: OFF[flag]})
    with pytest.raises(InvalidConversationError, match="weight is not 0 or 1"):
        read_conversation({"instruction": "a", "output": "b", flag: 0.5})


def test_positions_in_utf16_are_read_where_only_they_fit_the_texts(caplog: pytest.LogCaptureFixture) -> None:
    text, names = "🙂🙂東京の東京🙂の山田", ["東京", "東京", "山田"]
    starts = [text.index("東京"), text.rindex("東京"), text.index("山田")]
    counts = {
        "characters": starts,
        "UTF-16": [len(text[:start].encode("utf-16-le")) // 2 for start in starts],
    }
    wanted = [(start, start + 2) for start in starts]
    for unit, positions in counts.items():
        caplog.clear()
        spans = [
            {"start": start, "end": start + 2, "label": "A", "text": name}
            for start, name in zip(positions, names, strict=True)
        ]
        row = Row("a.jsonl, line 1", {"text": text, "spans": spans})
        (example,) = NamedEntities([row]).read([row])
        assert sorted((start, end) for _, start, end in example.spans) == wanted
        answers = [{"text": "東京🙂", "answer_start": positions[1]}, {"text": "山田", "answer_start": positions[2]}]
        asked = Row("a.jsonl, line 1", {"question": "a", "context": text, "answers": answers})
        assert Answers([asked]).read([asked])[0].answers == [("東京🙂", starts[1]), ("山田", starts[2])]
        assert caplog.text.count("read as UTF-16 units") == (2 if unit == "UTF-16" else 0)
    row.values["spans"][0]["text"] = "大阪"
    with pytest.raises(UserError, match='line 1: spans: "大阪" does not stand at 4 of the text'):
        NamedEntities([row]).read([row])
