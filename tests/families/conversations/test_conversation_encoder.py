"""Answers are marked as Transformers marks them, and as a manual encoding marks them, with any tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from chat_tokenizer import CHATML, MESSAGES, TEXTS, make_chat_tokenizer
from texts import write_texts
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from terakoya.components import EncodedDocuments
from terakoya.toolkit.tokenizers.line_encoder import vocabulary_of
from terakoya_conversations.chat_template import ChatTemplate, find_template
from terakoya_conversations.encoder import UNLIKE_PROMPT, ConversationEncoder
from terakoya_plugins.tokenizers.sentencepiece import SentencePiece

SYSTEM = {"role": "system", "content": "丁寧に答えてください。"}
ASKED_AGAIN = {"role": "user", "content": "空は？"}
CONVERSATIONS = [MESSAGES, MESSAGES[:2], [SYSTEM, *MESSAGES], [*MESSAGES, ASKED_AGAIN]]


def encoded(
    tokenizer: PreTrainedTokenizerBase, template: str, *conversations: list[dict[str, str]], context: Sequence[int] = ()
) -> EncodedDocuments:
    encoder = ConversationEncoder(tokenizer, ChatTemplate("x", template), vocabulary_of(tokenizer))
    return encoder.encode([orjson.dumps({"messages": each, "context": context}).decode() for each in conversations])


def rows(found: EncodedDocuments) -> list[tuple[list[int], list[bool]]]:
    learned = found.learned
    assert learned is not None
    bounds = np.concatenate([[0], np.cumsum(found.line_lengths)])
    return [(found.ids[a:b].tolist(), learned[a:b].tolist()) for a, b in pairwise(bounds)]


@pytest.fixture
def fast(tmp_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(make_chat_tokenizer(tmp_path / "fast"))


@pytest.mark.parametrize("name", ["alpaca", "alpaca_en"])
def test_ids_and_marks_are_those_of_transformers(fast: PreTrainedTokenizerBase, name: str, tmp_path: Path) -> None:
    fast.chat_template = find_template(name, fast, tmp_path).text
    found = encoded(fast, fast.chat_template, *CONVERSATIONS)
    for turns, (ids, answers) in zip(CONVERSATIONS, rows(found), strict=True):
        expected = fast.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == expected["input_ids"]
        assert answers == [bool(mark) for mark in expected["assistant_masks"]]
    assert found.document_lines.tolist() == [1] * 4 and not found.notes and not found.rejected


def test_without_marks_an_answer_ends_with_the_end_of_its_turn(fast: PreTrainedTokenizerBase) -> None:
    """The expected ids are encoded in pieces: special tokens and line ends separate them."""
    ids, answers = rows(encoded(fast, CHATML, [SYSTEM, *MESSAGES]))[0]
    expected: list[tuple[int, bool]] = []
    for turn in [SYSTEM, *MESSAGES]:
        learnt = turn["role"] == "assistant"
        for text, mark in (
            ("<|im_start|>" + turn["role"] + "\n", False),
            (turn["content"] + "<|im_end|>", learnt),
            ("\n", False),
        ):
            expected += [(token, mark) for token in fast(text, add_special_tokens=False)["input_ids"]]
    assert list(zip(ids, answers, strict=True)) == expected


@pytest.mark.parametrize("template", ["alpaca", CHATML])
def test_an_answer_that_is_context_is_read_and_not_learnt(
    fast: PreTrainedTokenizerBase, template: str, tmp_path: Path
) -> None:
    text = template if template == CHATML else find_template(template, fast, tmp_path).text
    ((ids, whole),) = rows(encoded(fast, text, [SYSTEM, *MESSAGES]))
    for context, left in ((2, MESSAGES[3]), (4, MESSAGES[1])):
        ((same, part),) = rows(encoded(fast, text, [SYSTEM, *MESSAGES], context=[context]))
        end = "<|im_end|>" if template == CHATML else "</s>"
        assert same == ids and all(all_ or not one for one, all_ in zip(part, whole, strict=True))
        assert fast.decode([token for token, mark in zip(ids, part, strict=True) if mark]) == left["content"] + end


def test_marks_that_cannot_be_told_apart_refuse_an_answer_that_is_context(fast: PreTrainedTokenizerBase) -> None:
    whole = "{% generation %}{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}{% endgeneration %}"
    assert encoded(fast, whole, MESSAGES).learned.all()
    assert encoded(fast, whole, MESSAGES, context=[1]).rejected == {0: "refused by the template"}


def test_a_mark_is_widened_to_the_end_of_the_turn(fast: PreTrainedTokenizerBase) -> None:
    bare = "{% generation %}{{- message['content'] -}}{% endgeneration %}{{- '<|im_end|>\\n' -}}"
    whole = CHATML.replace("message['content'] + '<|im_end|>\\n' -}}", "'' -}}" + bare)
    assert whole != CHATML
    ids, answers = rows(encoded(fast, whole, [MESSAGES[0], MESSAGES[1], ASKED_AGAIN]))[0]
    learnt = [token for token, mark in zip(ids, answers, strict=True) if mark]
    # the template marks each turn, also the user's: only the end of the marks matters
    end = fast.convert_tokens_to_ids("<|im_end|>")
    assert learnt.count(end) == 3 and ids[-1] != end
    assert fast.decode(learnt) == "".join(turn["content"] + "<|im_end|>" for turn in (*MESSAGES[:2], ASKED_AGAIN))


def test_a_mark_with_the_line_end_after_its_end_is_not_widened_into_the_next_turn(
    fast: PreTrainedTokenizerBase,
) -> None:
    turn = "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    fast.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}" + turn +
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )  # fmt: skip
    turns = [*MESSAGES[:2], ASKED_AGAIN, MESSAGES[1]]
    expected = fast.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    ids, answers = rows(encoded(fast, fast.chat_template, turns))[0]
    assert ids == expected["input_ids"] and sum(answers) > 4
    assert answers == [bool(mark) for mark in expected["assistant_masks"]]


def test_an_end_of_ordinary_text_is_learnt_without_the_line_end_after_it(fast: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '[.]\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    ids, answers = rows(encoded(fast, template, MESSAGES[:2]))[0]
    learnt = fast.decode([token for token, mark in zip(ids, answers, strict=True) if mark])
    assert learnt == "東京です。[.]"


def test_a_token_on_both_sides_of_a_border_is_part_of_the_answer() -> None:
    from tokenizers import Tokenizer, models

    pieces = {piece: id for id, piece in enumerate(["?", "Q", "A", ":", "x", "y", ":x", "!", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[(":", "x")], unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token="</s>")
    template = (
        "{% for m in messages %}{{ ('Q:' if m['role'] == 'user' else 'A:') + m['content'] }}"
        "{{ '</s>' if m['role'] == 'assistant' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    one, other = rows(
        found := encoded(
            tokenizer,
            template,
            [{"role": "user", "content": "y"}, {"role": "assistant", "content": "xy"}],
            [{"role": "user", "content": "y"}, {"role": "assistant", "content": "yx"}],
        )
    )
    assert tokenizer.convert_ids_to_tokens(one[0]) == ["Q", ":", "y", "A", ":x", "y", "</s>"]
    assert one[1] == [False, False, False, False, True, True, True]
    assert tokenizer.convert_ids_to_tokens(other[0]) == ["Q", ":", "y", "A", ":", "y", "x", "</s>"]
    assert other[1] == [False] * 5 + [True] * 3
    assert found.notes == {UNLIKE_PROMPT: 1}, "the first prompt ends with a token that the whole has not"


def test_a_token_that_crosses_the_end_of_an_answer_is_part_of_it() -> None:
    from tokenizers import Tokenizer, models

    pieces = {piece: id for id, piece in enumerate(["?", "Q", "A", ":", "x", "y", ".", ".Q"])}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[(".", "Q")], unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    template = "{% for m in messages %}{{ 'Q:' + m['content'] if m['role'] == 'user' else 'A:' + m['content'] + '.' }}"
    template += "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    turns = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "x"}]
    ((ids, answers),) = rows(encoded(tokenizer, template, [*turns, *turns]))
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["Q", ":", "y", "A", ":", "x", ".Q", ":", "y", "A", ":", "x", "."]
    assert [token for token, mark in zip(tokens, answers, strict=True) if mark] == ["x", ".Q", "x", "."]


def test_slow_tokenizers(tmp_path: Path) -> None:
    """SentencePiece's BPE with a line end as a piece, and MeCab's words, without line ends."""
    kind = SentencePiece(
        model_type="bpe", vocab_size=400, byte_fallback=True, user_defined_symbols=["\n"],
        normalization_rule_name="identity", hard_vocab_limit=False, character_coverage=1.0,
    )  # fmt: skip
    kind.train(write_texts(tmp_path / "corpus.jsonl", TEXTS * 4), tmp_path / "sentencepiece")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*"".join(TEXTS)} - {"\n", " "})]
    (tmp_path / "mecab").mkdir()
    pieces = [*words, *(f"##{word}" for word in words[5:])]
    (tmp_path / "mecab" / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    config = {
        "tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab", "do_lower_case": False,
        "subword_tokenizer_type": "wordpiece", "mecab_kwargs": {"mecab_dic": "unidic_lite"},
    }  # fmt: skip
    (tmp_path / "mecab" / "tokenizer_config.json").write_text(json.dumps(config))
    for name, end in (("sentencepiece", "</s>"), ("mecab", "[SEP]")):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert not tokenizer.is_fast
        tokenizer.chat_template = find_template("alpaca", tokenizer, tmp_path / name).text
        found = encoded(tokenizer, tokenizer.chat_template, *CONVERSATIONS)
        assert not found.notes
        for turns, (ids, answers) in zip(CONVERSATIONS, rows(found), strict=True):
            assert ids == tokenizer.apply_chat_template(turns, return_dict=False)
            expected: list[int] = []
            for number, turn in enumerate(turns):
                if turn["role"] == "assistant":
                    asked = tokenizer.apply_chat_template(turns[:number], add_generation_prompt=True, return_dict=False)
                    until = tokenizer.apply_chat_template(turns[: number + 1], return_dict=False)
                    assert until[: len(asked)] == asked and until[-1] == tokenizer.convert_tokens_to_ids(end)
                    expected += range(len(asked), len(until))
            assert np.flatnonzero(answers).tolist() == expected
        if name == "sentencepiece":
            assert tokenizer.decode(ids).startswith(
                "次の指示を読み、求められていることに応答してください。\n\n### 指示:\n日本"
            )


def test_conversations_that_a_template_refuses_or_omits_are_rejected(fast: PreTrainedTokenizerBase) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    found = encoded(fast, template, [SYSTEM, *MESSAGES], MESSAGES)
    assert found.rejected == {0: "refused by the template"} and found.document_lines.tolist() == [0, 1]
    assert len(rows(found)) == 1
    marks_long_ones = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content']|length > 5 %}"
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    found = encoded(fast, marks_long_ones, MESSAGES[:2], MESSAGES)
    assert found.rejected == {0: "no answer in the template's text"} and found.document_lines.tolist() == [0, 1]


def test_special_tokens_in_messages_are_counted_not_the_templates_own(fast: PreTrainedTokenizerBase) -> None:
    odd = [
        {"role": "user", "content": "</s>とは？", "input": "<pad>"},
        {"role": "assistant", "content": "終わり</s>です"},
    ]
    found = encoded(fast, CHATML, odd, MESSAGES)
    assert found.literals == {"</s>": 2, "<pad>": 1}
    ids, answers = rows(found)[0]
    assert fast.decode([token for token, mark in zip(ids, answers, strict=True) if mark]) == "終わり</s>です<|im_end|>"
