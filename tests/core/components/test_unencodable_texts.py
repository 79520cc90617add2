"""A text that the library of a tokenizer cannot encode ends every command in one line that names it, and code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy
from command_line import refusal
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from terakoya.components.tokenizer import encode_texts
from terakoya.errors import UserError

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "</s>", "a", "b", "user", "assistant")
GOOD, BAD = "a b a", "b strange"
REASON = "WordLevel error: Missing [UNK] token"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer that raises for an unknown word: it has no [UNK]."""
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **roles).save_pretrained(tmp_path / "tok")
    return tmp_path / "tok"


def corpus(folder: Path, *texts: str) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def make_model(folder: Path, tokenizer: Path, *, masked: bool) -> Path:
    size = {"vocab_size": len(WORDS)}
    if masked:
        config = BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, pad_token_id=0, **size
        )
        BertForMaskedLM(config).save_pretrained(folder)
    else:
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=32, **size)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer, local_files_only=True).save_pretrained(folder)
    return folder


def test_prepare_names_file_and_line(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [GOOD] * 3000 + [BAD] + [GOOD] * 3000  # far from the texts by which the size of the store is estimated
    file = corpus(tmp_path, *texts)
    words = ("prepare", file, "--tokenizer", tokenizer, "--out", tmp_path / "store", "--processes", "1")
    said = refusal(capsys, *words)
    assert f'{file}, line 3001: the tokenizer cannot encode the text "{BAD}": {REASON}' in said


def test_prepare_names_the_line_of_a_conversation(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    file = tmp_path / "chats.jsonl"
    rows = [{"instruction": GOOD, "output": answer} for answer in ("a", "a", "strange", "a")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("prepare", file, "--conversations", "--template", tmp_path / "template.jinja", "--tokenizer", tokenizer)
    said = refusal(capsys, *words, "--out", tmp_path / "store", "--processes", "1")
    assert f"{file}, line 3: the tokenizer cannot encode the text" in said and REASON in said


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "causal"])
def test_try_names_the_text(masked: bool, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model", tokenizer, masked=masked)
    expected = f'the tokenizer cannot encode the text "{BAD}": {REASON}'
    assert expected in refusal(capsys, "try", model, BAD)


def test_samples_name_the_text_before_the_first_step(tokenizer: Path, tmp_path: Path) -> None:
    from small_preparation import prepare_corpus

    from terakoya.config.parameters import Parameters
    from terakoya.corpus.corpus import Corpus
    from terakoya.training.setup import train_in_this_process
    from terakoya_plugins.tokenizers.huggingface import HuggingFace

    prepare_corpus(Corpus([corpus(tmp_path, *[GOOD] * 20)]), HuggingFace(), tokenizer, tmp_path / "store")
    events = {"samples": {"texts": [f"{BAD} [MASK]"]}}
    objective = {"type": "masked_lm", "whole_word_mask": False}
    settings = toy.parameters(tmp_path / "store", objective=objective, events=events, max_steps=1)
    with pytest.raises(UserError, match=r'the tokenizer cannot encode the text "b strange \[MASK\]": WordLevel'):
        train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    assert not toy.records(tmp_path / "run")


def test_a_panic_counts_and_other_errors_do_not() -> None:
    panic = type("PanicException", (BaseException,), {})

    def raise_for(error: BaseException, texts: list[str]) -> list[int]:
        if {"bad", "worse"} & {*texts}:
            raise error
        return [len(text) for text in texts]

    assert encode_texts(lambda texts: raise_for(panic("x"), texts), ["good", "a"]) == [4, 1]
    with pytest.raises(UserError, match=r'the text "bad": index out of range; leave the text out'):
        encode_texts(lambda texts: raise_for(panic("index\nout of range"), texts), ["good", "bad", "worse"])
    for error in (KeyboardInterrupt(), ValueError("other"), SystemExit(3)):
        with pytest.raises(type(error)):
            encode_texts(lambda texts, error=error: raise_for(error, texts), ["bad"])
