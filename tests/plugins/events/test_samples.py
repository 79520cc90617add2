"""Samples of a model in training: what they say, and that the model and its random numbers stay as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from terakoya import plugins
from terakoya.components import EventListener
from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "kami", "mito", "tone", "ruka"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


class Run(SimpleNamespace):
    """A run on one rank that keeps what is written and printed."""

    def write(self, kind: str, **values: Any) -> None:
        self.records.append((kind, values))

    def write_text(self, name: str, text: str) -> None:
        self.texts.append((name, text))

    def print(self, text: str) -> None:
        self.printed.append(text)

    warn = print


def make_run(model: PreTrainedModel, tokenizer: Path, **changes: Any) -> Any:
    attention.use(model, "sdpa")
    model.train()
    state = {
        "rank": 0, "step": 7, "holds_whole_model": True, "tokenizer_folder": tokenizer, "module": model,
        "device": torch.device("cpu"), "objective": SimpleNamespace(exports=lambda module: {"": module}),
        "records": [], "texts": [], "printed": [],
    }  # fmt: skip
    return Run(**{**state, **changes})


def listener(run: Any, **settings: Any) -> EventListener:
    started: EventListener = plugins.registry().component("events", "samples")(**settings).start(run)
    started.run_started(run)
    return started


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    ))  # fmt: skip


def test_a_masked_model_fills_in_and_stays_as_it_is(tokenizer: Path) -> None:
    model = bert()
    run = make_run(model, tokenizer)
    model.bert.pooler = None
    model.cls.eval()  # as a frozen part may be
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    backend, random_state = model.config._attn_implementation, torch.get_rng_state()
    filling = listener(run, texts=["kami [MASK] tone", "mito"], top=2)
    assert run.printed == ["events.samples: nothing can be said about ['mito']: a masked model needs [MASK] in them"]
    filling.validation_finished(run, {})
    ((kind, values),) = run.records
    ((first, second),) = values["masks"]
    assert kind == "sample" and values["text"] == "kami [MASK] tone"
    assert first[0] in WORDS and 1 > first[1] >= second[1] > 0
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        exact = model.eval()(input_ids=torch.tensor([[2, 5, 4, 7, 3]])).logits[0, 2].softmax(-1)
    assert first[1] == pytest.approx(float(exact.max()), abs=1e-3)
    assert run.texts == [("samples", f"kami [MASK] tone → {first[0]} {first[1]:.0%} {second[0]} {second[1]:.0%}")]
    model.config._attn_implementation = backend
    model.train()
    for name, module in model.named_modules():
        module.training = modes[name]
    filling.validation_finished(run, {})
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.config._attn_implementation == backend and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_causal_model_continues(tokenizer: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    run = make_run(model, tokenizer)
    listener(run, texts=["kami mito"], max_new_tokens=2).validation_finished(run, {})
    ((_, values),) = run.records
    assert len(values["continuation"].split()) == 2 and set(values["continuation"].split()) <= set(WORDS)


def test_what_cannot_be_sampled_is_said_or_refused(tokenizer: Path) -> None:
    parts = make_run(bert(), tokenizer, holds_whole_model=False)
    listener(parts, texts=["kami [MASK]"]).validation_finished(parts, {})
    assert not parts.records and "there are no samples" in parts.printed[0]
    other = make_run(bert(), tokenizer, rank=1)
    listener(other, texts=["kami [MASK]"]).validation_finished(other, {})
    assert not other.records and not other.printed
    with pytest.raises(UserError, match="expected texts below 8 tokens, got 9"):
        listener(make_run(bert(), tokenizer), texts=["kami [MASK] tone mito ruka kami tone"])
