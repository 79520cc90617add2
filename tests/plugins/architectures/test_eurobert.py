"""A Llama becomes an encoder: a run of EuroBERT starts from its folder, and its positions see both sides."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from transformers import AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import VOCABULARY
from terakoya_contract.toy import make_store as contract_store

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def settings(store: Path, llama: Path) -> Parameters:
    raw = toy.parameters(
        store, architecture={"type": "eurobert", **SIZES, "rope_theta": 500.0, "rms_norm_eps": 1e-6},
        objective={"type": "masked_lm"}, start_from={"folder": str(llama)}, max_steps=1,
        optimizer={"type": "adamw", "learning_rate": 1e-30, "weight_decay": 0.0},
    )  # fmt: skip
    return Parameters.from_dict(raw, source="test")


def test_the_logits_of_a_llama_that_sees_both_sides(tmp_path: Path) -> None:
    """After a step that moves nothing, the export has the logits of Transformers' Llama under an empty mask."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, vocab_size=VOCABULARY.size, tie_word_embeddings=False, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path / "llama")
    store = contract_store(tmp_path / "data").folder
    train_in_this_process(settings(store, tmp_path / "llama"), tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "model")
    encoder = AutoModelForMaskedLM.from_pretrained(done.out, local_files_only=True).eval()
    assert type(encoder).__name__ == "EuroBertForMaskedLM"
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    with torch.no_grad():
        ours = encoder(input_ids=ids).logits
        theirs = llama(input_ids=ids, attention_mask=torch.zeros(1, 1, 7, 7)).logits
        causal = llama(input_ids=ids).logits
    assert (ours - theirs).abs().max() < 1e-5 < (ours - causal).abs().max()


def test_a_model_with_other_weights_is_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SIZES, vocab_size=VOCABULARY.size)).save_pretrained(tmp_path / "mistral")
    store = contract_store(tmp_path / "data").folder
    with pytest.raises(UserError, match='is a model of type "mistral", the architecture is of type "eurobert"'):
        train_in_this_process(settings(store, tmp_path / "mistral"), tmp_path / "run")
