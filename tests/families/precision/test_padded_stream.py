"""Padded vocabulary heads of the bf16 stream: products with further columns, and nothing else that shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from exact_models import rounded
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from terakoya.components import Architecture
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.toolkit.objectives import padded_head as padding
from terakoya.toolkit.objectives._causal_module import CausalModule
from terakoya.toolkit.objectives.columns import Columns
from terakoya.toolkit.objectives.padded_head import padded_head
from terakoya.training.setup import train_in_this_process
from terakoya_plugins.architectures.gpt2 import GPT2
from terakoya_plugins.architectures.llama import Llama
from terakoya_precision.bf16_stream import PADDED_COPIES, WeightCopies

ODD, PADDED = 67, 128
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": ODD}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2_SIZES = {**SIZES, "n_positions": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "untied llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=False)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, intermediate_size=32, **NO_DROPOUT)),
    "electra's generator": lambda: ElectraForMaskedLM(
        ElectraConfig(**SIZES, intermediate_size=32, embedding_size=16, **NO_DROPOUT)
    ),
}


@pytest.fixture(autouse=True)
def also_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "DEVICES", ("cpu",))


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The columns of products that have those of a vocabulary, or more."""
    seen: set[int] = set()
    linear = F.linear

    def watched(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) in (ODD, PADDED, 200, 256):
            seen.add(len(weight))
        return linear(hidden, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def exact(model: PreTrainedModel, loss: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients of plain Transformers in float64, and `model` in float32 again."""
    model.double()
    total = loss()
    total.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    model.float()
    return total.item(), found


def assert_gradients(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    largest = max(each.norm() for each in wanted.values())
    for name, each in model.named_parameters():
        assert each.grad is not None and each.grad.dtype == torch.float32 and each.grad.shape == each.shape, name
        assert (each.grad - wanted[name]).norm() <= 0.03 * wanted[name].norm() + 1e-3 * largest, name


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_transformers(name: str, widths: set[int]) -> None:
    torch.manual_seed(0)
    model = rounded(MODELS[name]())
    before = {each: value.shape for each, value in model.state_dict().items()}
    ids, labels = torch.randint(0, ODD, (2, 8, 12)).unbind()
    expected, wanted = exact(
        model, lambda: F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    )
    copies = WeightCopies(model)
    widths.clear()
    with torch.autocast("cpu", torch.bfloat16):
        with padded_head(model) as columns:
            logits = model(ids).logits.flatten(0, 1)
        assert columns == Columns(ODD) and logits.shape == (96, PADDED) and not logits[:, ODD:].any()
        loss = padding_aware_loss(logits, labels)
        loss.backward()
        assert widths == {PADDED}
        assert model(ids).logits.shape[-1] == ODD
    assert loss.item() == pytest.approx(expected, rel=0.01)
    assert_gradients(model, wanted)
    assert {each: value.shape for each, value in model.state_dict().items()} == before
    # an update: the copies follow, and further rows stay 0
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    copies.refresh()
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    own = dict(head.named_parameters())
    for part, padded in getattr(head, PADDED_COPIES).items():
        assert torch.equal(padded[:ODD], own[part].bfloat16()) and len(padded) == PADDED and not padded[ODD:].any()


def padding_aware_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Written out in float32, without the project's own losses."""
    return F.cross_entropy(logits[:, :ODD].float(), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("family", ["gpt2", "untied llama"])
@pytest.mark.parametrize(("head_positions", "z_loss"), [(None, False), (20, False), (20, True)])
def test_heads_run_in_parts_too(family: str, head_positions: int | None, z_loss: bool, widths: set[int]) -> None:
    torch.manual_seed(0)
    model = rounded(MODELS[family]())
    architecture: Architecture = GPT2() if family == "gpt2" else Llama()
    ids, labels = torch.randint(0, ODD, (2, 8, 12)).unbind()

    def reference() -> Tensor:
        logits = model(ids).logits.flatten(0, 1)
        squares = logits.logsumexp(1).square().sum() if z_loss else 0.0
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") + squares

    expected, wanted = exact(model, reference)
    WeightCopies(model)
    widths.clear()
    batch = {
        "input_ids": ids, "position_ids": torch.arange(12).expand(8, 12), "document_ids": 0 * ids, "labels": labels,
    }  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        sums = CausalModule(architecture, model, z_loss=z_loss, head_positions=head_positions)(batch)
        total = torch.stack(list(sums.values())).sum()
        total.backward()
    assert widths == {PADDED}
    assert total.item() == pytest.approx(expected, rel=0.01)
    assert_gradients(model, wanted)


def test_the_gradients_of_a_tied_weight_are_added_up_in_place() -> None:
    model = MODELS["gpt2"]()
    WeightCopies(model)
    with torch.autocast("cpu", torch.bfloat16), padded_head(model):
        model(torch.arange(10)[None]).logits.float().sum().backward()
    gradient = model.get_output_embeddings().weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor) and gradient.untyped_storage().nbytes() == 4 * PADDED * 32


def test_a_weight_of_two_heads_has_one_copy() -> None:
    pair = nn.ModuleList([MODELS["gpt2"](), MODELS["gpt2"]()])
    first, second = (each.get_output_embeddings() for each in pair)  # type: ignore[operator]
    second.weight = first.weight
    copies = WeightCopies(pair)
    with torch.no_grad():
        first.weight.fill_(2.0)
    copies.refresh()
    hidden = torch.ones(1, 32, dtype=torch.bfloat16)
    assert first(hidden).tolist() == second(hidden).tolist() == [[64.0] * ODD]
    assert hasattr(first, PADDED_COPIES) and not hasattr(second, PADDED_COPIES)


@pytest.mark.parametrize(
    ("architecture", "objective", "plain", "auto"),
    [
        ({"type": "gpt2", "max_position_embeddings": 32}, "causal_lm", GPT2LMHeadModel, AutoModelForCausalLM),
        (
            {"type": "bert", "max_position_embeddings": 32, "intermediate_size": 32},
            "masked_lm",
            BertForMaskedLM,
            AutoModelForMaskedLM,
        ),
    ],
)
def test_an_export_of_a_padded_run_is_plain(
    architecture: dict[str, Any], objective: str, plain: Any, auto: Any, widths: set[int], tmp_path: Path
) -> None:
    """The vocabulary has 200 pieces, the padded head 256 columns."""
    store = toy.make_store(tmp_path / "train", documents=40, seed=1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = toy.parameters(
        store, architecture={**architecture, **sizes}, objective={"type": objective}, precision="bf16", max_steps=3,
        checkpoint={"save_steps": 3},
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    assert widths == {256}
    export(tmp_path / "run", tmp_path / "model")
    exported = auto.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    saved = {name.removeprefix("model."): value for name, value in toy.saved(checkpoint).items()}
    reference = plain(exported.config).eval()
    assert exported.config.vocab_size == 200
    missing = reference.load_state_dict({name: saved[name] for name in reference.state_dict() if name in saved}, False)
    assert not missing.unexpected_keys
    reference.tie_weights()
    ids = torch.randint(6, 200, (2, 20))
    with torch.no_grad():
        logits = exported(ids).logits
        assert logits.shape == (2, 20, 200)
        assert torch.equal(logits, reference(ids).logits)
