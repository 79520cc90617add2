"""What belongs to a model is not copied with its tokenizer: no model has the card or the scores of another."""

from __future__ import annotations

from pathlib import Path

import pytest
from labelled_examples import make_model
from small_preparation import prepare_corpus
from transformers import BertConfig, BertForMaskedLM

from terakoya.corpus.corpus import Corpus
from terakoya.plugins import registry
from terakoya.store.token_store import read_facts
from terakoya.toolkit.formats import folder_digests, transformers_folder
from terakoya.toolkit.formats.model_files import SCORES, belongs_to_model
from terakoya_forks import average

OF_A_MODEL = (
    "README.md", "training.svg", SCORES, average.RECORD, folder_digests.NAME,
    "generation_config.json", "model.safetensors", "pytorch_model-00001-of-00002.bin", "model.safetensors.index.json",
    "model.onnx", "adapter_config.json", "modules.json", "training_args.bin", "trainer_state.json", "eval_results.json",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokenizer, and with all that may be beside them."""
    made = make_model(tmp_path / "model")
    for name in (*OF_A_MODEL, "matrix.bin"):  # the last is a part of a MeCab dictionary
        if not (made / name).exists():
            (made / name).write_text("{}")
    return made


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_tokenizer_consists_of_its_own_files() -> None:
    assert all(belongs_to_model(Path("folder", name)) for name in OF_A_MODEL)
    kept = ("vocab.txt", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "terakoya.json", "config.json",
            "chat_template.jinja", "tokenization.py", "user.dic", "matrix.bin")  # fmt: skip
    assert not any(belongs_to_model(Path("folder", name)) for name in kept)


def test_a_store_has_the_tokenizer_of_a_model_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("kami ton\n\nkato nemi")
    kind = registry().component("tokenizers", "huggingface")()
    prepare_corpus(Corpus([tmp_path / "a.txt"]), kind, folder, tmp_path / "store")
    own = {"tokenizer.json", "tokenizer_config.json", "config.json", "matrix.bin"}
    assert names(tmp_path / "store/tokenizer") == own
    recorded = read_facts(tmp_path / "store").files
    assert {name for name in recorded if name.startswith("tokenizer/")} == {f"tokenizer/{name}" for name in own}


def test_a_model_is_written_without_what_lies_beside_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Stores and checkpoints that older versions wrote have such files beside their tokenizer."""
    model = BertForMaskedLM(BertConfig.from_pretrained(folder))
    (tmp_path / "new").mkdir()
    transformers_folder.write(model, folder, tmp_path / "new")
    own = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json", "matrix.bin"}
    assert names(tmp_path / "new") == own and (tmp_path / "new/model.safetensors").stat().st_size > 1000
