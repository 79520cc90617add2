"""Transformers folders that runs start from, and runs that start from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
)

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.errors import UserError
from terakoya.rows.stores import Stores
from terakoya.training.model.build import build_module
from terakoya.training.model.start_from import load_start_weights
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer
from terakoya.training.trainer import Trainer

BERT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "vocab_size": 200, "pad_token_id": 0,
}  # fmt: skip


ELECTRA = {**BERT, "embedding_size": 12, "num_attention_heads": 4}


GENERATOR = {**ELECTRA, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}


NEXT_SENTENCE = {"type": "masked_lm", "layout": "pairs", "next_sentence": True}


def spread(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """`model` with weights far from those that any seed of a run draws, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save_bert(folder: Path, kind: type[PreTrainedModel] = BertForMaskedLM, **changes: Any) -> PreTrainedModel:
    model = spread(kind(BertConfig(**{**BERT, **changes})), 1)
    model.save_pretrained(folder)
    return model


def save_electra(folder: Path, *, alike: bool = True) -> tuple[PreTrainedModel, PreTrainedModel]:
    """`generator/` and `discriminator/` in `folder`; `alike` with the same embeddings."""
    generator = spread(ElectraForMaskedLM(ElectraConfig(**GENERATOR)), 2)
    discriminator = spread(ElectraForPreTraining(ElectraConfig(**ELECTRA)), 3)
    if alike:
        discriminator.electra.embeddings.load_state_dict(generator.electra.embeddings.state_dict())
    generator.save_pretrained(folder / "generator")
    discriminator.save_pretrained(folder / "discriminator")
    return generator, discriminator


def settings(store: Path, start_from: Any, **changes: Any) -> dict[str, Any]:
    """The parameter JSON; a change of the architecture is of its keys."""
    raw = toy.parameters(store, start_from=start_from, max_steps=2)
    changes["architecture"] = toy.without_dropout(raw["architecture"]) | changes.get("architecture", {})
    return {**raw, **changes}


def electra(store: Path, start_from: Any, *, sharing: str = "tied") -> dict[str, Any]:
    architecture = {key: value for key, value in ELECTRA.items() if key not in ("vocab_size", "pad_token_id")}
    objective = {"type": "replaced_token", "generator_size": "1/2", "sharing": sharing}
    return {
        **toy.parameters(store, start_from=start_from, max_steps=2),
        "architecture": {"type": "electra", **architecture},
        "objective": objective,
    }


def begin(raw: Mapping[str, Any]) -> Any:
    """The root module after its start."""
    parameters = Parameters.from_dict(raw, source="test")
    stores = Stores.open(parameters.data)
    module = build_module(parameters, stores.vocabulary)
    begin.notes = load_start_weights(parameters, module, stores.vocabulary, stores.train[0].tokenizer_folder).notes  # type: ignore[attr-defined]
    return module


def refusal(raw: Mapping[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        begin(raw)
    return str(caught.value)


def trainer(raw: Mapping[str, Any], out: Path) -> Trainer:
    """The trainer of a run in this process."""
    parameters = Parameters.from_dict(raw, source="test")
    out.mkdir()
    run_log = RunLog(out, (), {}, active=False)
    context = connect(LaunchInfo.from_environment())
    return build_trainer(parameters, out, Stores.open(parameters.data), context, run_log)
