"""The notebook runs from top to bottom with any exported model, and what stands in it tells of no machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "notebooks"
SENTENCE = "先生は教室で子供たちに本を読んで聞かせた。"


def cells(file: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What a cell wrote."""
    return "".join("".join(each.get("text", "")) for each in cell["outputs"] if each["output_type"] == "stream")


def tokenizer_of_characters(source: str) -> PreTrainedTokenizerFast:
    """Characters of `source`, and the usual special pieces."""
    pieces = ["[UNK]", "[MASK]", "[CLS]", "[SEP]", "</s>", *sorted(set(source))]
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", mask_token="[MASK]", eos_token="</s>")


@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="nbclient and ipykernel are not installed (the extra notebook)",
)
@pytest.mark.timeout(600)
def test_it_runs_with_any_model(tmp_path: Path, forks: None) -> None:
    tokenizer = tokenizer_of_characters(SENTENCE + (FOLDER / "play.ipynb").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "num_hidden_layers": 2}
    gpt = GPT2LMHeadModel(GPT2Config(**sizes, hidden_size=32, num_attention_heads=2, initializer_range=0.3)).eval()
    bert = BertForMaskedLM(BertConfig(**sizes, hidden_size=32, num_attention_heads=2, intermediate_size=64))
    for model, name in ((gpt, "gpt"), (bert, "bert")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    out = tmp_path / "played.ipynb"
    command = [sys.executable, str(FOLDER / "execute.py"), "--model", str(tmp_path / "gpt"), "--out", str(out)]
    done = subprocess.run(
        [*command, "--encoder", str(tmp_path / "bert")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    texts = [printed(cell) for cell in cells(out)]
    assert f"GPT2LMHeadModel with {gpt.num_parameters():,} parameters" in texts[1]
    ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
    with torch.no_grad():
        chances = gpt(ids).logits[0].double().log_softmax(-1)
    mean = -sum(float(chances[place, ids[0, place + 1]]) for place in range(ids.shape[1] - 1)) / (ids.shape[1] - 1)
    shown = next(re.search(rf"([\d.]+)  {SENTENCE}", text) for text in texts if SENTENCE in text)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-3, abs=0.1)
    pictures = [each["data"]["image/png"] for cell in cells(out) for each in cell["outputs"] if "data" in each]
    assert len(pictures) == 1
    assert len(re.findall(r"^ *[\d.]+%  ", texts[-1], re.M)) == 5


def test_what_stands_in_it_was_executed_and_is_small() -> None:
    file = FOLDER / "play.ipynb"
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) < 120_000
    assert not re.search(r"/(home|root|work|tmp|Users)/\w|\"iopub|\d{4}-\d\d-\d\dT", text.replace("work/model", ""))
    for number, cell in enumerate(cells(file), start=1):
        assert cell["execution_count"] == number
        assert all(each["output_type"] != "error" and each.get("name") != "stderr" for each in cell["outputs"])
        assert cell["outputs"]
