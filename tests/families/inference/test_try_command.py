"""`terakoya try` prints a model's predictions, as a user sees them."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from canary import Canary
from command_line import call
from rich.console import Console
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    BertTokenizer,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
)

from terakoya.atomic_files import FileFacts
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.runs import checkpoints
from terakoya_inference.commands.try_model import print_tokens
from terakoya_inference.predictions import TokenPrediction, fill_mask, find_replaced, with_sentinels
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.electra import Electra
from terakoya_plugins.architectures.roberta import Roberta
from terakoya_plugins.architectures.t5 import T5

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "山", "に", "雪", "が", "降る", "電話"]
VOCABULARY = Vocabulary(size=len(WORDS), pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 12,
}  # fmt: skip
TEXT = "山 に 電話 が 降る"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of an ELECTRA: a generator that predicts 雪, and a discriminator that marks 電話."""
    torch.manual_seed(0)
    base = tmp_path_factory.mktemp("electra")
    electra = Electra(embedding_size=8, **SIZES)  # type: ignore[arg-type]
    generator, discriminator = electra.build(VOCABULARY, "masked"), electra.build(VOCABULARY, "discriminator")
    assert isinstance(generator, ElectraForMaskedLM) and isinstance(discriminator, ElectraForPreTraining)
    words = torch.zeros(len(WORDS), 8)
    words[WORDS.index("電話")] = 40 * torch.arange(-4.0, 4.0)
    with torch.no_grad():
        generator.generator_lm_head.bias[WORDS.index("雪")] = 50.0
        discriminator.electra.embeddings.word_embeddings.weight.copy_(words)
        head = discriminator.discriminator_predictions
        example = discriminator.electra(torch.tensor([[2, 5, 6, 10, 8, 9, 3]])).last_hidden_state
        inner = torch.nn.functional.gelu(head.dense(example))[0]
        direction = inner[3] - inner[[0, 1, 2, 4, 5, 6]].mean(0)
        scores = inner @ direction
        middle = (scores[3] + scores[[0, 1, 2, 4, 5, 6]].max()) / 2
        scale = 8.0 / (scores[3] - middle)
        head.dense_prediction.weight.copy_((direction * scale)[None])
        head.dense_prediction.bias.fill_(-float(middle * scale))
    save(generator, base / "generator")
    save(discriminator, base / "discriminator")
    return base


def save(model: PreTrainedModel, folder: Path) -> None:
    """Saves `model` and a tokenizer of `WORDS` into `folder`."""
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False, tokenize_chinese_chars=False).save_pretrained(folder)


def run_try(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Runs `terakoya try`, checks its exit code, and returns its output, or its error output if `code` is not 0."""
    ended, out, err = call(capsys, "try", *arguments)
    assert ended == code, err
    return out if code == 0 else err


def test_a_discriminator_marks_replaced_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_try(capsys, str(folder), TEXT).splitlines()
    assert out[0] == "山 に «電話» が 降る"
    assert len(out) == 2 and out[1].endswith("電話") and 0.9 < float(out[1].split()[0]) <= 1.0
    tokens = find_replaced(folder / "discriminator", TEXT)
    assert [each.token for each in tokens] == TEXT.split(), "tokens that the tokenizer adds are left out"
    assert [each.replaced for each in tokens] == [False, False, True, False, False]
    assert [each.token for each in find_replaced(folder, "山 に 犬")] == ["山", "に", "[UNK]"], "unknown words are kept"


def test_in_a_terminal_replaced_tokens_are_red() -> None:
    tokens = [TokenPrediction("山", 0.1), TokenPrediction("電話", 0.9)]
    for options, expected in (
        ({"force_terminal": True, "color_system": "standard"}, "山 \x1b[1;31m電話\x1b[0m"),
        ({"force_terminal": True, "no_color": True}, "«電話»"),
        ({"force_terminal": False}, "山 «電話»"),
    ):
        console = Console(file=StringIO(), highlight=False, **options)  # type: ignore[arg-type]
        print_tokens(tokens, console)
        assert expected in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_replaced_tokens_the_most_probable_one_is_printed() -> None:
    console = Console(file=StringIO(), highlight=False)
    print_tokens([TokenPrediction("[山]", 0.1), TokenPrediction("雪", 0.3)], console)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "[山] 雪", "the model considers no token replaced; the most probable one:", "   0.300  雪"
    ]  # fmt: skip


def test_the_generator_reads_a_text_with_a_mask(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_try(capsys, str(folder), "山 に [MASK] が 降る", "--top", "2").splitlines()
    assert out[0] == "[MASK] 1" and out[1].endswith("雪") and len(out) == 3
    for typed in ("［MASK］", "［ＭＡＳＫ］"):  # as Japanese keyboards write it
        assert run_try(capsys, str(folder), f"山 に {typed} が 降る", "--top", "2").splitlines() == out
    assert fill_mask(folder / "generator", "[MASK]")[0][0].word == "雪"
    texts = ["山 に [MASK] が 降る", "- [MASK] に"]
    out = run_try(capsys, str(folder), *texts, "--top", "1").splitlines()
    assert [out[0], out[1], out[3], out[4]] == [texts[0], "[MASK] 1", texts[1], "[MASK] 1"], "each below its text"


def test_a_masked_language_model_may_be_in_the_folder_itself(tmp_path: Path) -> None:
    model = Bert(**SIZES).build(VOCABULARY, "masked")  # type: ignore[arg-type]
    assert isinstance(model, BertForMaskedLM)
    save(model, tmp_path)
    assert len(fill_mask(tmp_path, "[MASK] に [MASK]", top=3)) == 2
    with pytest.raises(UserError, match="expected a discriminator"):
        find_replaced(tmp_path, TEXT)


def test_a_token_classifier_with_the_label_replaced_is_a_discriminator(tmp_path: Path) -> None:
    labels = {0: "replaced", 1: "original"}
    config = BertConfig(vocab_size=len(WORDS), **SIZES, id2label=labels, label2id={"replaced": 0, "original": 1})
    model = BertForTokenClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([2.0, 0.0]))
    save(model, tmp_path)
    tokens = find_replaced(tmp_path, TEXT)
    assert [each.token for each in tokens] == TEXT.split()
    assert {round(each.probability, 4) for each in tokens} == {0.8808}, "the logistic function of 2"


def test_a_checkpoints_models_use_the_tokenizer_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000001"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "tokenizer").mkdir()
    for name in ("generator", "discriminator"):
        (checkpoint / "model" / name).mkdir()
        for file in (folder / name).iterdir():
            kept = file.name in ("config.json", "model.safetensors")
            target = checkpoint / ("model/" + name if kept else "tokenizer") / file.name
            target.write_bytes(file.read_bytes())
    files = {
        path.relative_to(checkpoint).as_posix(): FileFacts.of(path).model_dump()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    facts = {"format": checkpoints.FORMAT, "step": 1, "files": files}
    (checkpoint / "manifest.json").write_text(json.dumps(checkpoints.with_hash(facts)))
    assert find_replaced(checkpoint, TEXT)[2].replaced
    weights = checkpoint / "model/discriminator/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: model/discriminator/model\.safetensors: content changed"):
        find_replaced(checkpoint, TEXT)


def test_an_encoder_decoder_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = T5(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).build(VOCABULARY, "seq2seq")
    with torch.no_grad():  # for any input it generates 雪, whose embedding is by far the longest
        for weight in (model.shared.weight, model.decoder.block[0].layer[2].DenseReluDense.wo.weight):
            weight.abs_()
        model.shared.weight[WORDS.index("雪")] *= 100
    save(model, tmp_path)
    out = run_try(capsys, str(tmp_path), TEXT).split()
    assert len(out) == 64 and set(out) == {"雪"}


def test_masks_become_the_sentinels_of_an_encoder_decoder() -> None:
    class Pieces:
        mask_token_id = 4

        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {"[MASK]": 4, "[unused1]": 6, "[unused0]": 5, "山": 7}

    assert with_sentinels([7, 4, 7, 4, 7, 4], Pieces) == [7, 5, 7, 6, 7, 4]


def test_a_model_whose_positions_begin_later_takes_fewer_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(Roberta(**SIZES).build(VOCABULARY, "masked"), tmp_path)  # type: ignore[arg-type]
    assert "takes at most 12" in run_try(capsys, str(tmp_path), "[MASK] " * 11, code=2)
    assert "[MASK] 10\n" in run_try(capsys, str(tmp_path), "[MASK] " * 10)


def test_mistakes_are_explained(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "found no config.json" in run_try(capsys, str(tmp_path), TEXT, code=2)
    assert "takes at most 12" in run_try(capsys, str(folder), "山 " * 11, code=2)
    assert "has 13 tokens" in run_try(capsys, str(folder), "[MASK] " * 11, code=2)
    assert "expected a [MASK] to fill in" in run_try(capsys, str(folder / "generator"), TEXT, code=2)


CUSTOM_CODE = """
from transformers import BertConfig, BertForMaskedLM


class CustomConfig(BertConfig):
    model_type = "custom"


class CustomForMaskedLM(BertForMaskedLM):
    config_class = CustomConfig
"""


@pytest.fixture
def custom_model(tmp_path: Path) -> Path:
    """A model with custom code, as an export writes it."""
    folder = tmp_path / "custom"
    save(BertForMaskedLM(BertConfig(vocab_size=len(WORDS), **SIZES)), folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "custom_model.CustomConfig", "AutoModelForMaskedLM": "custom_model.CustomForMaskedLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "custom", "auto_map": names}))
    (folder / "custom_model.py").write_text(CUSTOM_CODE)
    return folder


def test_custom_code_runs_only_if_the_user_allows_it(
    custom_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the command read from the terminal"))
    error = run_try(capsys, str(custom_model), "山 に [MASK]", code=2)
    assert "the folder contains its code, custom_model.py. Read" in error and "--trust-remote-code (in Python" in error
    assert "[MASK] 1" in run_try(capsys, str(custom_model), "山 に [MASK]", "--trust-remote-code")


def test_a_folder_that_cannot_be_loaded_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (folder / "generator").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "cannot be loaded: Error no file named model.safetensors" in run_try(
        capsys, str(tmp_path), "山 に [MASK]", code=2
    )


def test_pickled_weights_that_ask_for_more_are_an_error_and_run_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (folder / "generator").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({"weight": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    said = run_try(capsys, str(tmp_path), "山 に [MASK]", code=2)
    assert "a pickle that is damaged or asks for more than tensors; it was not read" in said
    assert not (tmp_path / "ran").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "a pickle that is damaged" in run_try(capsys, str(tmp_path), "山 に [MASK]", code=2)


def test_a_model_with_the_head_of_a_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertForTokenClassification(BertConfig(vocab_size=len(WORDS), num_labels=3, **SIZES)).save_pretrained(tmp_path)  # type: ignore[arg-type]
    assert "BertForTokenClassification was fine-tuned for a task" in run_try(capsys, str(tmp_path), TEXT, code=2)
