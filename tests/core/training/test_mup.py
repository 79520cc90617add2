"""With `mup`, initial values and learning rates follow Tensor Programs V, in every engine and after a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_runs import assert_close, checkpoint, here, state
from torch import nn
from transformers import AutoModelForCausalLM

from terakoya.components import Architecture, Objective
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.store.token_store import TokenStore
from terakoya.training.engines.learning_rates import build_optimizer, set_learning_rate
from terakoya.training.model import mup
from terakoya.training.model.build import build_module
from terakoya_contract.toy import VOCABULARY
from terakoya_contract.toy import settings as toy_settings

TIMES = 4
BERT = {
    "type": "bert", "hidden_size": 8 * TIMES, "num_hidden_layers": 2, "num_attention_heads": 2 * TIMES,
    "intermediate_size": 16 * TIMES, "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MASKED = {"type": "masked_lm"}
ELECTRA = {**BERT, "type": "electra", "embedding_size": 8 * TIMES}
LLAMA = {
    "type": "llama", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 34, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


def parameters(
    architecture: dict[str, Any], objective: dict[str, Any], base_width: int | None = 8, **changes: Any
) -> Parameters:
    raw = {
        **toy.parameters(Path("store"), architecture=architecture, objective=objective),
        "mup": None if base_width is None else {"base_width": base_width},
        **changes,
    }
    return Parameters.from_dict(raw, source="test")


def scales(architecture: dict[str, Any], objective: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Initial value and learning rate of each weight, without the parts of its name that say where it is."""
    settings = parameters(architecture, objective)
    found = mup.find_scales(settings, build_module(settings, VOCABULARY), VOCABULARY)
    return {name: (each.initial, each.rate) for name, each in found.items()}


ALONE, HIDDEN, OUTPUT = (1.0, 1.0), (TIMES**-0.5, 1 / TIMES), (1 / TIMES, 1 / TIMES)
"""Table 3: input weights, biases and norms; hidden weights; output weights. For Adam, relative to the base width."""


def test_scales_are_those_of_the_paper() -> None:
    found = scales(BERT, MASKED)
    before_head = "model.cls.predictions.transform.LayerNorm"
    for name, scale in found.items():
        matrix = name.endswith("weight") and not ("LayerNorm" in name or "embeddings" in name)
        expected = OUTPUT if name.startswith(before_head) else HIDDEN if matrix else ALONE
        assert scale == expected, name
    untied = scales({**LLAMA, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4,
                     "intermediate_size": 64, "tie_word_embeddings": False}, {"type": "causal_lm"})  # fmt: skip
    assert untied["model.lm_head.weight"] == OUTPUT
    assert untied["model.model.embed_tokens.weight"] == untied["model.model.norm.weight"] == ALONE
    assert untied["model.model.layers.0.self_attn.k_proj.weight"] == HIDDEN
    electra = scales(ELECTRA, {"type": "replaced_token"})
    assert electra["discriminator.discriminator_predictions.dense_prediction.weight"] == OUTPUT
    assert electra["generator.generator_predictions.LayerNorm.weight"] == OUTPUT
    assert electra["generator.electra.embeddings_project.weight"] == HIDDEN
    assert electra["generator.electra.embeddings.word_embeddings.weight"] == ALONE


WITH_MUP = [
    name for name in registry().names("architectures") if registry().component("architectures", name).mup_widths
]


@pytest.mark.parametrize("name", WITH_MUP)
def test_modules_of_every_objective_have_scales(name: str) -> None:
    """At half the base width matrices learn twice as fast. Weights depend on the seed alone."""
    architecture, trained = toy_settings(registry().component("architectures", name)), 0
    assert isinstance(architecture, Architecture)
    for objective in registry().names("objectives"):
        task = toy_settings(registry().component("objectives", objective))
        assert isinstance(task, Objective)
        with contextlib.suppress(UserError):  # it has no head for this one
            task.build(architecture, VOCABULARY)
            settings = parameters(
                {"type": name, **architecture.model_dump(mode="json")},
                {"type": objective, **task.model_dump(mode="json")},
                2 * architecture.hidden_size,  # type: ignore[attr-defined]
            )
            module, random = build_module(settings, VOCABULARY), torch.get_rng_state()
            found = mup.find_scales(settings, module, VOCABULARY)
            assert torch.equal(random, torch.get_rng_state())
            assert found.keys() == dict(module.named_parameters()).keys()
            assert {each.rate for each in found.values()} == {1.0, 2.0}
            trained += 1
    assert trained


def test_initial_values_have_these_deviations() -> None:
    plain, scaled = (
        dict(build_module(parameters(BERT, MASKED, base), VOCABULARY).named_parameters()) for base in (None, 8)
    )
    for name, (initial, _) in scales(BERT, MASKED).items():
        torch.testing.assert_close(scaled[name], initial * plain[name], rtol=1e-6, atol=0.0)


def test_the_norm_before_a_tied_head_is_an_output_multiplier() -> None:
    """Adam on the folded model takes the steps of Adam on a model whose logits are multiplied by base / width, which is
    how the paper's table 8 describes a head that is tied to embeddings."""
    settings = parameters(BERT, MASKED, optimizer={"type": "adamw", "weight_decay": 0.1, "eps": 1e-30})
    folded = build_module(settings, VOCABULARY).double()
    found = mup.find_scales(settings, folded, VOCABULARY)
    explicit = build_module(settings, VOCABULARY).double()
    with torch.no_grad():
        for value in explicit.get_submodule("model.cls.predictions.transform.LayerNorm").parameters():
            value.mul_(TIMES)
    shares = {name: each.rate for name, each in found.items()}
    ours = build_optimizer(settings.optimizer, folded, shares, fused=False)
    groups = []
    for name, value in explicit.named_parameters():
        rate = 1.0 if name.startswith("model.cls.predictions.transform.LayerNorm") else shares[name]
        groups.append({"params": [value], "lr": 1e-2 * rate, "weight_decay": 0.1 / rate if value.ndim > 1 else 0.0})
    reference = torch.optim.AdamW(groups, betas=settings.optimizer.betas, eps=1e-30)  # type: ignore[attr-defined]
    set_learning_rate(ours, 1e-2)
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(5, 64, (4, 16), generator=generator) for _ in range(2))

    def logits(model: Any, factor: float) -> torch.Tensor:
        head = model.cls.predictions
        return head.decoder(head.transform(model.bert(ids).last_hidden_state) * factor)

    for _ in range(4):
        outputs = []
        for module, optimizer, factor in ((folded, ours, 1.0), (explicit, reference, 1 / TIMES)):
            outputs.append(logits(module.model, factor))
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs[-1].flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-12)


def test_weights_shrink_by_the_same_part_at_every_width() -> None:
    """The learning rate times the weight decay is the same in all groups that have decay."""
    settings = parameters(BERT, MASKED, optimizer={"type": "adamw", "weight_decay": 0.1})
    module = build_module(settings, VOCABULARY)
    shares = {name: each.rate for name, each in mup.find_scales(settings, module, VOCABULARY).items()}
    optimizer = build_optimizer(settings.optimizer, module, shares, fused=False)
    set_learning_rate(optimizer, 0.01)
    decays = {group["lr"] * group["weight_decay"] for group in optimizer.param_groups}
    assert sorted(decays) == pytest.approx([0.0, 0.001])
    grouped = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(grouped) == sorted(map(id, module.parameters()))


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_updates_of_muon_have_one_largest_singular_value(adjust_lr_fn: str) -> None:
    """The spectral condition (Yang et al., 2023, arXiv:2310.17813): with widths in proportion it does not change with
    the width."""
    largest: dict[str, list[float]] = {}
    for times in (1, TIMES):
        sizes = {name: times * BERT[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
        optimizer = {"type": "muon", "weight_decay": 0.0, "adjust_lr_fn": adjust_lr_fn}
        settings = parameters({**BERT, **sizes}, MASKED, 8 * TIMES, optimizer=optimizer)
        module = build_module(settings, VOCABULARY)
        shares = {name: each.rate for name, each in mup.find_scales(settings, module, VOCABULARY).items()}
        built = build_optimizer(settings.optimizer, module, shares, fused=False)
        set_learning_rate(built, 0.01)
        generator = torch.Generator().manual_seed(1)
        before = {name: value.detach().clone() for name, value in module.named_parameters()}
        for value in module.parameters():
            value.grad = torch.randn(value.shape, generator=generator)
        built.step()
        for name, value in module.named_parameters():
            if ".layer." in name and value.ndim == 2:
                change = float(torch.linalg.matrix_norm((value - before[name]).detach(), ord=2))
                largest.setdefault(name, []).append(change)
    assert len(largest) == 12
    for narrow, wide in largest.values():
        assert wide == pytest.approx(narrow, rel=0.1)


# ---------------------------------------------------------------------------------------------------------- runs


def run_settings(store: Path, **changes: Any) -> dict[str, Any]:
    return {
        **toy.parameters(store, batch_size={"-1": 4}),
        "architecture": LLAMA,
        "objective": {"type": "causal_lm", "append_eos": False},
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.1},
        "mup": {"base_width": 10},
        "micro_batch_size": 2,
        "max_steps": 2,
        "checkpoint": {"save_steps": 1},
        **changes,
    }


@pytest.fixture(scope="module")
def one(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mup") / "one"
    here(out, run_settings(store))
    return out


@pytest.mark.slow
def test_the_export_is_a_plain_model(one: Path, store: Path, tmp_path: Path) -> None:
    """Its config has nothing of `mup`, and the weights alone are the model that was trained."""
    export(one, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    usual = Parameters.from_dict(run_settings(store, mup=None), source="test")
    vocabulary = TokenStore.open(store).facts.vocabulary
    assert model.config.to_diff_dict().keys() <= {
        *usual.architecture.config(vocabulary).to_diff_dict(), "architectures", "dtype", "transformers_version"
    }  # fmt: skip
    for name, value in state(one, "model").items():
        assert torch.equal(model.state_dict()[name.removeprefix("model.")], value), name


@pytest.mark.slow
def test_a_matrix_moves_as_far_as_its_rate_says(one: Path, store: Path, tmp_path: Path) -> None:
    """One step of Adam moves each weight by the learning rate: those of matrices by half, at twice the base width."""
    values = run_settings(store, max_steps=1, optimizer={"type": "adamw", "learning_rate": 0.01, "weight_decay": 0.0})
    values |= {"schedule": {"type": "constant"}, "checkpoint": {"save_steps": 1}}
    here(tmp_path / "run", values)
    after = state(tmp_path / "run", "model", 1)
    settings = Parameters.from_dict(values, source="test")
    vocabulary = TokenStore.open(store).facts.vocabulary
    before = {name: value.detach() for name, value in build_module(settings, vocabulary).named_parameters()}
    moved = {name: float((after[name] - value).abs().max()) for name, value in before.items()}
    assert moved["model.model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.005, rel=1e-3)
    assert moved["model.model.norm.weight"] == pytest.approx(0.005, rel=1e-3)
    assert moved["model.model.embed_tokens.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["model.model.layers.1.input_layernorm.weight"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_at_the_base_width_nothing_differs(store: Path, tmp_path: Path) -> None:
    here(tmp_path / "plain", run_settings(store, mup=None))
    here(tmp_path / "base", run_settings(store, mup={"base_width": 20}))
    assert_close(state(tmp_path / "plain", "model"), state(tmp_path / "base", "model"), 0.0)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_base_width(one: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other values of mup"):
        here(tmp_path / "run", run_settings(store, mup={"base_width": 20}), checkpoint(one, 1))
