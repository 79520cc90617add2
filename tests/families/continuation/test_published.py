"""What `init --from` reads of a published model's folder, as plain Transformers wrote it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selection import at_night
from tiny_exports import make_model, train_tokenizer
from transformers import (
    BertConfig,
    BertModel,
    ElectraConfig,
    ElectraForPreTraining,
    T5Config,
    T5ForConditionalGeneration,
)

from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.model.start_config import compare_settings
from terakoya_continuation.published import OBJECTIVES, read_model

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def pairs() -> Iterator[tuple[str, str]]:
    """Yields each bundled architecture with the head that `init --from` trains."""
    for name in registry().names("architectures"):
        head = next((each for each in OBJECTIVES if each in registry().component("architectures", name).heads), None)
        if head is not None:
            yield name, head


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("words") / "tokenizer", "mecab_wordpiece", vocab_size=120)


@pytest.mark.parametrize(
    ("name", "head"),
    at_night(
        pairs(), always=[("bert", "masked"), ("roberta", "masked"), ("modernbert", "masked"), ("llama", "causal")]
    ),
)
def test_the_architecture_is_that_of_the_config(name: str, head: str, tokenizer: Path, tmp_path: Path) -> None:
    """The config that its settings make means the same as the one in the folder."""
    model = make_model(name, head, tokenizer, "mecab_wordpiece")  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    read = read_model(str(tmp_path))
    assert (read.type, read.kind, read.lacks_head) == (name, head, False)
    assert read.width == model.config.hidden_size
    component = registry().component("architectures", name)
    assert read.length == (component.model_validate(read.settings).max_sequence_length() or 512)
    vocabulary = registry().component("tokenizers", "mecab_wordpiece")().encoder(tokenizer).vocabulary
    made = component.model_validate(read.settings).config(vocabulary)
    settable = frozenset(component.model_fields)
    assert compare_settings(model.config, made, settable) == ([], [])


def test_a_body_gets_a_head(tokenizer: Path, tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    assert read_model(str(tmp_path)).lacks_head


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_model(str(folder))
    return str(caught.value)


def test_what_cannot_be_continued_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert "expected a Transformers folder" in refusal(tmp_path / "nothing")
    config.write_text(json.dumps({"model_type": "bart", "vocab_size": 9}))
    assert f"{tmp_path}: has no tokenizer; expected one of tokenizer.json" in refusal(tmp_path)
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    assert 'of type "bart", which no architecture has; expected one of bert, ' in refusal(tmp_path)
    ElectraForPreTraining(ElectraConfig(**SMALL)).save_pretrained(tmp_path)
    assert "expected a model of class ElectraForMaskedLM, got ElectraForPreTraining" in refusal(tmp_path)
    T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=8, d_ff=8, num_layers=1)).save_pretrained(tmp_path)
    assert "is neither a masked nor a causal language model" in refusal(tmp_path)
    config.write_text(json.dumps({"model_type": "bert", "vocab_size": 9, **SMALL, "num_attention_heads": 3}))
    assert "num_attention_heads: expected a divisor of hidden_size 16, got 3" in refusal(tmp_path)
