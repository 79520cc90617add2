"""Small tokenizers with the tokens that chats need, and some conversations, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MESSAGES: list[dict[str, str]] = [
    {"role": "user", "content": "日本の首都はどこですか？"},
    {"role": "assistant", "content": "東京です。"},
    {"role": "user", "content": "人口は？"},
    {"role": "assistant", "content": "約千四百万人です。\n多いですね。"},
]
WITH_INPUT = {
    "instruction": "次の文を要約してください。",
    "input": "空は青い。\n海も青い。",
    "output": "空と海は青い。",
}
TEXTS = [turn["content"] for turn in MESSAGES] * 3 + [
    "### 指示:\n次の文を要約してください。\n\n### 入力:\n空は青い。\n\n### 応答:\n空と海は青い。",
    "次の指示を読み、求められていることに応答してください。\n\n",
    "Read the instruction and write a response. ### Instruction:\n### Response:\n",
]
CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""A template of a common shape, without marks: what ends a turn is followed by a line end."""


def make_chat_tokenizer(folder: Path, **settings: Any) -> Path:
    """A byte-level BPE tokenizer with `<s>`, `</s>`, `<pad>` and ChatML's two tokens, saved into `folder`; `settings`
    are those of `PreTrainedTokenizerFast`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    backend.train_from_iterator(TEXTS, trainer)
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    further = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **{**named, **further, **settings}).save_pretrained(folder)
    return folder


def write_lines(file: Path, *records: Any) -> Path:
    """`file` with one JSON line for each of `records`; strings as they are."""
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in records]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
