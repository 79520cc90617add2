"""The causal model families: published sizes, Transformers' losses for each token, documents kept apart, and the same
training as plain Transformers and torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import transformers
from pydantic import ValidationError
from selection import at_night

from terakoya.components import Architecture, Objective
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.plugins import registry
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import VOCABULARY
from terakoya_contract.toy import make_store as contract_store

PRESETS = Path(__file__).resolve().parents[2] / "parameters"
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILY: dict[str, dict[str, Any]] = {
    "gpt2": {**WIDTHS, **STILL},
    "llama": {**WIDTHS, "intermediate_size": 64, "num_key_value_heads": 2, "rope_theta": 500.0},
    "qwen3": {**WIDTHS, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16},
    "qwen3-local": {
        **WIDTHS, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 1,
    },
    "gptj": {**WIDTHS, "rotary_dim": 4},
    "mistral": {**WIDTHS, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 5},
    # norms of small outputs would make rounding errors large
    "olmo2": {**WIDTHS, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.1},
    "gemma3_text": {
        **WIDTHS, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 9,
        "sliding_window": 4, "sliding_window_pattern": 2, "rope_theta": 500.0, "rope_local_base_freq": 50.0,
    },
    "modernbert_decoder": {
        **WIDTHS, "intermediate_size": 64, "num_hidden_layers": 4, "local_attention": 8, "global_rope_theta": 500.0,
        "local_rope_theta": 50.0,
    },
}  # fmt: skip


def architecture_of(name: str, **changes: Any) -> Architecture:
    return registry().component("architectures", name.partition("-")[0])(**FAMILY[name] | changes)


def build(name: str, **objective: Any) -> tuple[Any, Any, Any]:
    """The objective, its module and the model in it, with perturbed weights."""
    learnt: Objective = registry().component("objectives", "causal_lm")(**objective)
    torch.manual_seed(0)
    module: Any = learnt.build(architecture_of(name), VOCABULARY)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    module.model.tie_weights()
    return learnt, module.eval(), module.model


# ------------------------------------------------------------------------------ losses, token by token


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


BOTH = at_night(
    itertools.product(FAMILY, ("sdpa", "eager")), always=[*((name, "sdpa") for name in FAMILY), ("gpt2", "eager")]
)


@pytest.mark.parametrize(("name", "backend"), BOTH)
def test_each_token_of_a_packed_row_has_the_loss_of_its_single_document(
    name: str, backend: str, tmp_path: Path
) -> None:
    """The single document, followed by its end, runs through plain Transformers."""
    objective, module, model = build(name)
    store = contract_store(tmp_path / "toy")
    source = RowSource(store, objective.row_layout(), sequence_length=60, seed=1)
    batch = objective.collate(source.load(0, np.arange(4)), VOCABULARY)
    arrays = {key: torch.from_numpy(value) for key, value in batch.arrays.items()}
    attention.use(module, backend)
    with torch.no_grad():
        logits = module.architecture.logits(model, module.architecture.hidden(model, arrays))
    attention.release(model)
    seen = 0
    for row in range(4):
        assert arrays["document_ids"][row].max() >= 1
        for number in range(int(arrays["document_ids"][row].max()) + 1):
            here = arrays["document_ids"][row] == number
            labels = arrays["labels"][row][here]
            document = torch.cat([arrays["input_ids"][row][here], labels[-1:]])
            assert torch.equal(document[1:], labels) and document[-1] == VOCABULARY.eos
            with torch.no_grad():
                alone = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            one, other = token_losses(alone, labels), token_losses(logits[row][here], labels)
            assert (one - other).abs().max() < 1e-5 * max(1.0, float(one.max()))
            seen += len(labels)
    assert seen == batch.counts["targets"] == batch.counts["tokens"]


@pytest.mark.parametrize(("name", "backend"), BOTH)
def test_the_loss_of_joined_rows_is_transformers_own(name: str, backend: str, tmp_path: Path) -> None:
    objective, module, model = build(name, layout="stream")
    source = RowSource(contract_store(tmp_path / "toy"), objective.row_layout(), sequence_length=32, seed=1,
                       shuffle=False)  # fmt: skip
    batch = objective.collate(source.load(0, np.arange(len(source) - 3, len(source))), VOCABULARY)
    arrays = {key: torch.from_numpy(value) for key, value in batch.arrays.items()}
    real = arrays["document_ids"] >= 0
    assert not real.all(), "the last row is not full"
    attention.use(module, backend)
    with torch.no_grad():
        ours = module(arrays)["lm_loss"]
    attention.release(model)
    with torch.no_grad():
        output = model(input_ids=arrays["input_ids"], attention_mask=real.long(), shift_labels=arrays["labels"],
                       labels=arrays["labels"], use_cache=False)  # fmt: skip
    assert abs(float(ours) / batch.counts["targets"] - float(output.loss)) < 1e-5 * float(output.loss)


# ------------------------------------------------------------------------------ a whole training


def plain_losses(name: str, settings: dict[str, Any], store: Any, initial: Any) -> list[float]:
    """The losses of 50 steps of plain Transformers with torch's AdamW from the weights `initial`, on the same rows."""
    parameters = Parameters.from_dict(settings, source="test")
    model = type(initial)(initial.config)
    model.load_state_dict(initial.state_dict())
    source = RowSource(store, parameters.objective.row_layout(), sequence_length=32, seed=parameters.seed)
    loader = Loader([source], [1.0])
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    losses = []
    for step in range(50):
        rows = loader.load(step * 8, step * 8 + 8)
        assert rows.labels is not None
        real = torch.from_numpy(rows.document_ids >= 0)
        labels = torch.from_numpy(rows.labels).long()
        logits = model(
            input_ids=torch.from_numpy(rows.tokens).long(), attention_mask=real.long(), use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 50)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", at_night(
    ("gpt2", "llama", "qwen3", "gptj", "mistral", "olmo2", "gemma3_text", "modernbert_decoder"),
    always=("qwen3",),
))  # fmt: skip
def test_fifty_steps_are_those_of_plain_transformers(name: str, tmp_path: Path) -> None:
    store = contract_store(tmp_path / "data")
    settings = toy.parameters(
        store.folder, architecture={"type": name, **FAMILY[name]}, objective={"type": "causal_lm", "layout": "stream"},
        optimizer={"type": "adamw", "learning_rate": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        schedule={"type": "linear"}, batch_size={"-1": 8}, micro_batch_size=3, max_steps=50,
        checkpoint={"save_steps": 50},
    )  # fmt: skip
    initial: Any = build_module(Parameters.from_dict(settings, source="test"), store.facts.vocabulary)
    theirs = plain_losses(name, settings, store, initial.model)
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    ours = [loss for _, (loss, _) in sorted(toy.losses(tmp_path / "run").items())]
    assert len(ours) == len(theirs) == 50 and theirs[-1] < theirs[0] - 0.5
    assert np.abs(np.array(ours) / np.array(theirs) - 1).max() < 1e-5
    done = export(tmp_path / "run", tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.out, local_files_only=True)
    assert done.models == {"": type(loaded).__name__} and loaded.config.eos_token_id == VOCABULARY.eos
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.out, local_files_only=True)
    given = tokenizer("w1 w2 w3", return_tensors="pt")
    assert loaded.generate(**given, max_new_tokens=5, min_new_tokens=5).shape == (1, 8)


@pytest.mark.nightly
def test_nodes_of_seven_five_and_four_rows_train_the_same_as_one_of_sixteen(tmp_path: Path) -> None:
    settings = toy.parameters(
        contract_store(tmp_path / "data").folder, architecture={"type": "llama", **FAMILY["llama"]}, max_steps=4,
        objective={"type": "causal_lm", "z_loss": 1e-2}, batch_size={"-1": 16},
    )  # fmt: skip
    toy.train(settings, tmp_path / "one")
    toy.train({**settings, "batch_size": {"0": 7, "1": 5, "2": 4}}, tmp_path / "three", nodes=(1, 1, 1))
    one, three = toy.losses(tmp_path / "one"), toy.losses(tmp_path / "three")
    for step, values in one.items():
        assert np.allclose(values, three[step], rtol=1e-5), step


# ------------------------------------------------------------------------------ sizes, and how weights begin

KINDS = ("gpt2", "gptj", "llama", "qwen3", "mistral", "olmo2", "gemma3")
PUBLISHED: dict[str, tuple[int, float]] = {
    # vocabulary, parameters in millions
    "gpt2_125m": (50_257, 124.44),  # GPT-2 small
    "gpt2_300m": (50_257, 354.82),  # GPT-2 medium
    "gptj_6b": (50_400, 6_053.38),
    "llama_1b": (32_000, 1_100.05),  # TinyLlama
    "llama_1b_trunk": (32_000, 1_100.05),
    "llama_8b": (65_024, 7_512.3),  # with 4,096 x 65,024 words twice, of input and output
    "olmo2_1b": (100_352, 1_484.92),
    "gemma3_270m": (262_144, 268.1),
}


def test_every_preset_of_full_size_is_in_the_table() -> None:
    found = {file.stem for kind in KINDS for file in PRESETS.glob(f"{kind}_*.json")}
    assert set(PUBLISHED) == found - {"llama_mup"}, "the shape of llama_mup is nobody's"


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_size(preset: str) -> None:
    words, millions = PUBLISHED[preset]
    parameters = Parameters.load(PRESETS / f"{preset}.json")
    with torch.device("meta"):
        model = parameters.architecture.build(Vocabulary(size=words, eos=2, special=(2,)), "causal")
    assert abs(sum(each.numel() for each in model.parameters()) / 1e6 / millions - 1) < 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gptj"])
def test_output_layers_are_initialised_smaller_with_scaled_init(name: str) -> None:
    output = {"gpt2": ("c_proj",), "gptj": ("out_proj", "fc_out")}.get(name, ("o_proj", "down_proj"))
    wide = {"hidden_size": 128, "num_hidden_layers": 8, "initializer_range": 0.008}
    for scaled in (False, True):
        torch.manual_seed(1)
        model = architecture_of(name, scaled_init=scaled, **wide).build(VOCABULARY, "causal")
        matrices = {key: weight for key, weight in model.named_parameters() if weight.ndim == 2 and ".mlp." in key}
        matrices |= {key: weight for key, weight in model.named_parameters() if weight.ndim == 2 and "attn" in key}
        for key, weight in matrices.items():
            is_output = key.split(".")[-2] in output
            expected = 0.008 / 4 if scaled and is_output else 0.008  # sqrt(2 x 8) = 4
            assert abs(float(weight.detach().std()) / expected - 1) < 0.05, key
        assert sum(key.split(".")[-2] in output for key in matrices) == 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"num_attention_heads": 5}, "num_attention_heads: expected a divisor"),
        ("llama", {"num_attention_heads": 5}, "expected heads of an even size"),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 32}, "expected heads of an even size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ("qwen3", {"head_dim": 15}, "even number"),
        ("gptj", {"rotary_dim": 10}, "at most 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        architecture_of(name, **changes)


@pytest.mark.parametrize("name", [name for name in FAMILY if "num_key_value_heads" in FAMILY[name]])
def test_without_a_number_each_head_has_keys_and_values_of_its_own(name: str) -> None:
    model = architecture_of(name, num_key_value_heads=None).build(VOCABULARY, "causal")
    weights = dict(model.named_parameters())
    shapes = {weight.shape for key, weight in weights.items() if key.endswith(("q_proj.weight", "k_proj.weight"))}
    assert len(shapes) == 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "modernbert_decoder"])
def test_an_end_token_that_is_also_the_padding_is_learned(name: str) -> None:
    vocabulary = VOCABULARY.model_copy(update={"pad": VOCABULARY.eos})
    model = architecture_of(name).build(vocabulary, "causal")
    model.get_input_embeddings()(torch.tensor([VOCABULARY.eos])).sum().backward()  # type: ignore[operator]
    assert model.get_input_embeddings().weight.grad[VOCABULARY.eos].abs().sum() > 0  # type: ignore[union-attr, index]


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_one_kernel_computes_the_activation_of_eight_operations(name: str) -> None:
    *_, model = build(name)
    plain = type(model)(model.config).double().eval()
    plain.load_state_dict(model.state_dict())
    assert model.config.activation_function == "gelu_new"
    assert any(isinstance(part, torch.nn.GELU) for part in model.modules())
    assert not any(isinstance(part, torch.nn.GELU) for part in plain.modules())
    ids = torch.arange(40)[None] % VOCABULARY.size
    with torch.no_grad():
        one, other = model.double()(input_ids=ids).logits, plain(input_ids=ids).logits
    assert (one - other).abs().max() < 1e-12 * other.abs().max()
