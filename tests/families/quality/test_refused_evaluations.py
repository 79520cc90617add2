"""What `evaluate` and `finetune` cannot do ends in one line that says where and why, and code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from canary import Canary
from command_line import refusal
from safetensors.torch import load_file
from start_folders import save_bert, settings
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import terakoya
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training import setup
from terakoya_quality.finetuning.model import finished_model

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "</s>", "a", "b")
GOOD, BAD = "a b a", "b strange"
TUNE = "finetune hf --task classification --train c.jsonl --eval c.jsonl --out m"
MISTAKES = [
    (f"{TUNE} --epochs 0", "error: epochs.0: expected greater than or equal to 1, got 0\n"),
    (f"{TUNE} --optimizer moun", 'optimizer moun: not installed; did you mean "muon"'),
    (f"{TUNE} --schedule plateau", "schedule: plateau follows validation losses"),
    (
        f"{TUNE} --schedule " + '{"type":"linear","warmup_tokens":3}',
        "schedule.warmup_tokens: a fine-tuning has its own",
    ),
    (
        "evaluate r --tasks jsts --data . --optimizer " + '{"type":"adamw","betas":1}',
        "jsts: settings: optimizer: betas: ",
    ),
    (f"{TUNE} --learning-rate nan", "learning_rates.0: expected ", ", got NaN"),
    ("evaluate run", "run: expected a run with a whole checkpoint, or a checkpoint; found no", "train it first"),
    ("evaluate run --out data", "--out data: expected a file, got a folder; give --out data/evaluation.json"),
    ("evaluate r --data c.jsonl", "c.jsonl: expected a finished token store, got a corpus", "terakoya prepare c.jsonl"),
    ("evaluate r", "its run has no validation store; name a store: --data STORE"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `r`, one without a checkpoint, `run`, a store's folder `data` and a corpus."""
    folder = tmp_path_factory.mktemp("mistakes")
    base = toy.parameters(toy.make_store(folder / "data", documents=20, seed=1), max_steps=1)
    setup.train_in_this_process(Parameters.from_dict(base, source="test"), folder / "r")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "c.jsonl").write_text('{"text": "a"}\n')
    return folder


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do(
    row: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    command, *said = row
    answer = refusal(capsys, *command.split(" "))
    assert all(words in answer for words in said) and not (place / "m").exists()


def test_a_step_of_a_run_is_what_is_fine_tuned(place: Path) -> None:
    trained = load_file(place / "r/checkpoints/step-00000001/model/model.safetensors")
    with finished_model(Path(f"{place / 'r'}@1")) as folder:
        exported = load_file(folder / "model.safetensors")
    shared = exported.keys() & trained.keys()
    assert len(shared) > 5 and all(torch.equal(exported[name], trained[name]) for name in shared)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "causal"])
def test_a_text_that_the_tokenizer_cannot_encode_is_named(
    masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size: dict[str, Any] = {"vocab_size": len(WORDS)}
    if masked:
        config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, **size)
        BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    else:
        config = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=32, **size)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = {f"{name.strip('[]').lower()}_token": name for name in WORDS if name.startswith("[")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **roles)
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in (GOOD, BAD)))
    said = f'{file}, line 2: the tokenizer cannot encode the text "{BAD}": WordLevel error: Missing [UNK] token'
    assert said in refusal(capsys, "evaluate", tmp_path / "model", "--corpus", file)


def test_pickled_weights_that_ask_for_more_run_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({"weight": Canary(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    (tmp_path / "text.txt").write_text("kami ton\n")
    said = refusal(capsys, "evaluate", tmp_path, "--corpus", tmp_path / "text.txt")
    assert "a pickle that is damaged or asks for more than tensors; it was not read" in said
    assert not (tmp_path / "ran").exists()


def test_apples_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    with pytest.raises(UserError, match=r"--device mps: .*float64.* use --device cpu"):
        terakoya.evaluate("nowhere", device="mps")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # from PeftModel
def test_the_model_under_adapters_must_be_unchanged(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base, run = tmp_path / "base", tmp_path / "run"
    save_bert(base)
    raw = settings(store, str(base), max_steps=1, lora={"r": 4, "lora_alpha": 8})
    setup.train_in_this_process(Parameters.from_dict(raw, source="test"), run)
    assert terakoya.evaluate(run, stores=[store], limit=2).results[str(store)]["rows"] == 2
    save_bert(base, hidden_dropout_prob=0.3)
    with pytest.raises(UserError, match=r"base/config\.json.*: changed since the run"):
        terakoya.evaluate(run, stores=[store])
