"""Adapters train as in peft; only adapters are saved; exports are in the formats of Transformers and peft."""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from killed_runs import kill_and_resume
from safetensors import safe_open
from safetensors.torch import load_file
from saved_weights import relative_error
from selection import at_night
from start_folders import electra, save_bert, save_electra, settings, spread, trainer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertModel,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.runs import checkpoints
from terakoya.training.batches import to_device
from terakoya.training.checkpoint.restoring import restore_module
from terakoya.training.model import lora
from terakoya.training.model.build import build_module
from terakoya.training.setup import StartOptions, train_in_this_process
from terakoya_contract import toy as small

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # from PeftModel

GPT2 = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
IDS = {"vocab_size": 200, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
CAUSAL = {"type": "causal_lm", "append_eos": False}
ADAPTERS = {"r": 4, "lora_alpha": 8}


def make(kind: str, store: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of 3 steps with adapters over a model of `kind`, which is saved in the new `folder`; changes
    of `lora` are of its keys."""
    torch.manual_seed(5)  # the same model in every run of the tests
    changes["lora"] = {**ADAPTERS, **changes.get("lora", {})}
    changes = {"max_steps": 3, "optimizer": {"type": "adamw", "learning_rate": 0.05}, **changes}
    if kind == "bert":
        save_bert(folder)
        return settings(store, str(folder), **changes)
    model: PreTrainedModel
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**GPT2, **IDS))
        architecture = {"type": "gpt2", **GPT2}
    else:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS, tie_word_embeddings=False))
        architecture = {"type": "llama", **LLAMA, "tie_word_embeddings": False}
    spread(model, 1).save_pretrained(folder)
    return toy.parameters(
        store, start_from=str(folder), **{"architecture": architecture, "objective": CAUSAL, **changes}
    )


def run(raw: Mapping[str, Any], out: Path, **options: Any) -> Path:
    """Runs `raw` and returns the run's last checkpoint."""
    done = train_in_this_process(Parameters.from_dict(raw, source="test"), out, StartOptions(**options)).checkpoint
    assert done is not None
    return done


def names(folder: Path, kind: str) -> list[str]:
    with safe_open(folder / f"state/{kind}-00000.safetensors", "pt") as file:
        return list(file.keys())


def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(6, 200, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model.eval()(ids, attention_mask=torch.ones_like(ids)).logits
    return found


def unmerged(folder: Path) -> torch.nn.Module:
    manifest = checkpoints.read_manifest(folder)
    return restore_module(
        folder,
        Parameters.from_dict(manifest["parameters"], source="test"),
        Vocabulary.model_validate(manifest["vocabulary"]),
        tokenizer_folder=folder / "tokenizer",
        started_from=manifest["started_from"],
    )


KINDS = {
    "gpt2": (AutoModelForCausalLM, {"target_modules": ["c_attn", "mlp.c_proj"], "use_rslora": True}),
    "llama": (AutoModelForCausalLM, {"target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]}),
    "bert": (AutoModelForMaskedLM, {"init_lora_weights": "gaussian"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", at_night(KINDS, always=("llama",)))
def test_one_tuned_model_in_three_formats(kind: str, store: Path, tmp_path: Path) -> None:
    """Merged without peft, as an adapter for peft, and as it was trained: the same logits. The base is unchanged."""
    from peft import PeftModel  # here: it takes two seconds, in every process that collects this test

    auto, chosen = KINDS[kind]
    raw = make(kind, store, tmp_path / "base", lora=chosen)
    before = hashlib.sha256((tmp_path / "base/model.safetensors").read_bytes()).hexdigest()
    last = run(raw, tmp_path / "run")
    assert hashlib.sha256((tmp_path / "base/model.safetensors").read_bytes()).hexdigest() == before
    module = unmerged(last)
    trained = logits(module.model)  # type: ignore[arg-type]
    done = export(tmp_path / "run", tmp_path / "out")
    base = auto.from_pretrained(tmp_path / "base", local_files_only=True)
    assert (logits(base) - trained).abs().max() > 0.01, "the adapters are trained"
    for folder in (last / "model", done.out):
        merged, info = auto.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (logits(merged) - trained).abs().max() < 1e-5
        for name, value in base.state_dict().items():
            same = torch.equal(value, merged.state_dict()[name])
            targets = {"gpt2": ("c_attn.weight", "mlp.c_proj.weight"), "bert": ("query.weight", "value.weight")}
            expected = not name.endswith(targets[kind]) if kind in targets else ".layernorm" in name or "embed" in name
            assert same == expected or "layernorm" in name, name
    for folder in (last / "adapter", done.out / "adapter"):
        again = auto.from_pretrained(tmp_path / "base", local_files_only=True)
        both = PeftModel.from_pretrained(again, folder)
        assert (logits(both) - trained).abs().max() < 1e-6
    first = run({**raw, "max_steps": 1}, tmp_path / "one")
    assert (logits(auto.from_pretrained(first / "model")) - trained).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sharing", at_night(("tied", "disentangled"), always=("disentangled",)))
def test_each_of_two_models_has_its_adapter(sharing: str, store: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    save_electra(tmp_path / "base")
    raw = {**electra(store, str(tmp_path / "base"), sharing=sharing), "lora": ADAPTERS}
    raw["optimizer"] = {"type": "adamw", "learning_rate": 0.05}
    last = run(raw, tmp_path / "run")
    done = export(last, tmp_path / "out")
    exported = unmerged(last)
    for name, kind in (("generator", ElectraForMaskedLM), ("discriminator", ElectraForPreTraining)):
        merged = kind.from_pretrained(done.out / name, local_files_only=True)
        base = kind.from_pretrained(tmp_path / "base" / name, local_files_only=True)
        assert (logits(merged) - logits(base)).abs().max() > 1e-4
        for folder in (done.out / name / "adapter", last / "adapter" / name):
            both = PeftModel.from_pretrained(copy.deepcopy(base), folder)
            assert (logits(both) - logits(merged)).abs().max() < 1e-5
        assert (logits(getattr(exported, name)) - logits(merged)).abs().max() < 1e-5
    assert {name.split(".")[0] for name in names(last, "model")} == {"generator", "discriminator"}


@pytest.mark.nightly
def test_the_moving_average_of_adapters_is_merged(store: Path, tmp_path: Path) -> None:
    raw = make("bert", store, tmp_path / "base", max_steps=4, events={"ema": {"decay": 0.5}})
    folder = run(raw, tmp_path / "run")
    export(folder, tmp_path / "ema", weights="ema")
    averages, trained = (
        load_file(folder / "events/ema.safetensors"),
        load_file(folder / "state/model-00000.safetensors"),
    )
    assert averages.keys() == trained.keys() and not any(
        torch.equal(averages[name], trained[name]) for name in averages
    )
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "ema"))
    adapted = [name for name in averages if ".lora_A." in name]
    assert adapted
    for name in adapted:
        product = averages[name.replace(".lora_A.", ".lora_B.")].double() @ averages[name].double()
        weight = name.partition(".lora_A.")[0].removeprefix("model.") + ".weight"
        expected = base[weight].double() + ADAPTERS["lora_alpha"] / ADAPTERS["r"] * product
        assert (merged[weight].double() - expected).abs().max() < 1e-6


@pytest.mark.slow
def test_a_checkpoint_holds_only_what_is_trained(store: Path, tmp_path: Path) -> None:
    raw = make("gpt2", store, tmp_path / "base", checkpoint={"save_steps": 2}, lora={"modules_to_save": ["ln_f"]})
    last = run(raw, tmp_path / "run")
    saved = names(last, "model")
    assert sorted(saved) == sorted(
        [f"model.transformer.h.{layer}.attn.c_attn.lora_{which}.default.weight" for layer in (0, 1) for which in "AB"]
        + [f"model.transformer.ln_f.modules_to_save.default.{each}" for each in ("weight", "bias")]
    )
    assert {name.rpartition("/")[0] for name in names(last, "optimizer")} == set(saved)
    assert (last / "model").is_dir() and not (last.parent / "step-00000002/model").exists(), (
        "only the last one is merged"
    )
    assert (last.parent / "step-00000002/adapter/adapter_model.safetensors").is_file()
    start = toy.records(tmp_path / "run", "start")[0]
    plain = sum(value.numel() for value in load_file(tmp_path / "base/model.safetensors").values())
    adapters = 2 * (4 * 16 + 48 * 4) + 2 * 16
    assert (start["parameter_count"], start["trained_parameter_count"]) == (plain, adapters)
    layers, head = 2 * (4 * 16**2 + 2 * 16 * 64), 16 * 200
    context = (start["flops_per_token"] - 4 * (layers + head) - 6 * 2 * (4 * 16 + 48 * 4)) / (12 * 2 * 16 / 2)
    assert 3 < context < 32, "frozen weights take 4 operations"


def documents(batch: Mapping[str, Tensor], name: str) -> list[tuple[Tensor, Tensor]]:
    """Each document of `batch` by itself, with its part of the array `name`."""
    found = []
    for row in range(len(batch["input_ids"])):
        for document in batch["document_ids"][row].unique():
            if document >= 0:
                there = batch["document_ids"][row] == document
                found.append((batch["input_ids"][row][there][None], batch[name][row][there]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", at_night(("gpt2", "bert"), always=("gpt2",)))
def test_gradients_are_those_of_plain_peft(kind: str, store: Path, tmp_path: Path) -> None:
    """The same batch in peft's own model over plain Transformers, document by document."""
    from peft import LoraConfig, get_peft_model

    raw = make(kind, store, tmp_path / "base", lora={"target_modules": "all-linear"})
    ours = trainer(raw, tmp_path / "run")
    generator = torch.Generator().manual_seed(3)
    values = {name: value for name, value in ours.run.module.named_parameters() if value.requires_grad}
    assert values and all("lora_" in name for name in values)
    with torch.no_grad():
        for value in values.values():  # otherwise the second matrix is zero, and the first has no gradient
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    batch = to_device(ours.batches(0).real[0], torch.device("cpu"), flash=False)
    loss = "lm_loss" if kind == "gpt2" else "mlm_loss"
    ours.engine.micro_step(batch, lambda sums: sums[loss], last=True)

    auto = KINDS[kind][0]
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=kind == "gpt2")
    model = get_peft_model(auto.from_pretrained(tmp_path / "base", local_files_only=True), config).train()
    theirs = {name.removeprefix("base_model."): value for name, value in model.named_parameters()}
    with torch.no_grad():
        for name, value in values.items():
            theirs[name].copy_(value)
    if kind == "bert":
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
        batch["labels"].flatten()[batch["masked_positions"]] = batch["masked_labels"]
    total = sum(
        F.cross_entropy(model(ids).logits[0], labels, ignore_index=-100, reduction="sum")
        for ids, labels in documents(batch, "labels")
    )
    total.backward()  # type: ignore[union-attr]
    trained = {name for name, value in theirs.items() if value.requires_grad}
    assert trained == values.keys()
    mine, other = ({name: each[name].grad for name in values} for each in (values, theirs))
    assert all(value.norm() > 0 for value in other.values())
    assert relative_error(other, mine) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("processes", (1, 2))
def test_killed_and_resumed_is_bit_identical(processes: int, store: Path, tmp_path: Path) -> None:
    table = {"0": 9, "1": 7} if processes == 2 else {"-1": 16}
    raw = make("gpt2", store, tmp_path / "base", batch_size=table, max_steps=12, lora={"lora_dropout": 0.2})
    said, _ = kill_and_resume(raw, tmp_path, nodes=(1,) * processes)
    assert "10,304 frozen parameters and 512 trained ones (LoRA of rank 4)" in said
    adapters = [
        (tmp_path / name / "checkpoints/step-00000012/adapter/adapter_model.safetensors").read_bytes()
        for name in ("cut", "straight")
    ]
    assert adapters[0] == adapters[1]


@pytest.mark.slow
def test_the_folder_under_the_adapters_must_exist_unchanged(store: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    raw = make("bert", store, base)
    run({**raw, "max_steps": 1}, tmp_path / "run")
    longer = Parameters.from_dict(raw, source="test")
    base.rename(tmp_path / "elsewhere")
    for use in (
        lambda: train_in_this_process(longer, tmp_path / "run"),
        lambda: export(tmp_path / "run", tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=r"no such folder.*\n.*a checkpoint holds only the adapters"):
            use()
    moved = Parameters.from_dict({**raw, "start_from": str(tmp_path / "elsewhere")}, source="test")
    train_in_this_process(moved, tmp_path / "run", StartOptions(allow_change=frozenset({"start_from"})))
    export(tmp_path / "run", tmp_path / "out")
    shutil.copytree(tmp_path / "elsewhere", base)
    save_bert(base, hidden_dropout_prob=0.3)
    shutil.rmtree(tmp_path / "elsewhere")
    base.rename(tmp_path / "elsewhere")
    last = tmp_path / "run/checkpoints/step-00000003"
    more = Parameters.from_dict({**raw, "max_steps": 4, "start_from": str(tmp_path / "elsewhere")}, source="test")
    for use in (
        lambda: train_in_this_process(more, tmp_path / "run"),
        lambda: export(last, tmp_path / "other"),
    ):
        with pytest.raises(UserError, match=r"elsewhere/config\.json, .*model\.safetensors: changed since the run"):
            use()


@pytest.mark.slow
def test_settings_that_decide_what_is_saved_never_change(store: Path, tmp_path: Path) -> None:
    raw = make("gpt2", store, tmp_path / "base", max_steps=1)
    run(raw, tmp_path / "run")

    def resume(leave: str = "", **changes: Any) -> None:
        changed = {**raw, "max_steps": 2, "lora": {**raw["lora"], **changes} if changes else None}
        run(changed, tmp_path / "run", allow_change=frozenset(filter(None, {leave})))

    for leave in ("", "lora"):
        with pytest.raises(UserError, match=r"other values of lora\.r, which determine what its checkpoints hold"):
            resume(leave, r=2)
        with pytest.raises(UserError, match=r"lora\.r.*which determine what its checkpoints hold"):
            resume(leave)
    with pytest.raises(UserError, match=r"--allow-change lora\.lora_alpha"):
        resume(lora_alpha=16)
    resume("lora.lora_alpha", lora_alpha=16)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"start_from": None}, "lora: adapters adapt a trained model"),
    ("gpt2", {"frozen_layers": 1}, "frozen_layers: with lora every weight of the model is frozen, got 1"),
    ("gpt2", {"lora": {"load_in_4bit": True}}, r'lora\.load_in_4bit: unknown key; that is "lora\.quantization" here'),
    ("gpt2", {"lora": {"rank": 4}}, "lora.rank: unknown key"),
    ("gpt2", {"lora": {"init_lora_weights": "pissa"}}, "lora.init_lora_weights: expected"),
    ("gpt2", {"lora": {"target_modules": "c_attn"}}, "lora.target_modules"),
    ("gpt2", {"lora": {"target_modules": ["c_atn"]}}, "c_atn.*linear layers: c_attn, c_proj, c_fc, lm_head"),
    ("gpt2", {"lora": {"target_modules": ["c_attn", "q"]}}, "target_modules: GPT2LMHeadModel has no q; expected some"),
    ("gpt2", {"lora": {"modules_to_save": ["head"]}}, "modules_to_save: GPT2LMHeadModel has no head"),
    ("gpt2", {"lora": {"target_modules": ["ln_1"]}}, "ln_1|LayerNorm"),
    ("gpt2", {"lora": {"target_modules": ["wpe"]}}, "wpe of GPT2LMHeadModel is an embedding"),
    ("gpt2", {"lora": {"target_modules": ["lm_head"]}}, r"lm_head in GPT2LMHeadModel is tied to .*wte"),
    ("bert", {"lora": {"modules_to_save": ["cls"]}}, r"a weight of cls in BertForMaskedLM is tied to"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSALS)
def test_impossible_settings_are_refused(
    kind: str, changes: dict[str, Any], said: str, store: Path, tmp_path: Path
) -> None:
    raw = make(kind, store, tmp_path / "base")
    raw |= {**changes, "lora": {**raw["lora"], **changes.get("lora", {})}}
    with pytest.raises(UserError, match=said):
        trainer(raw, tmp_path / "run")


def test_a_randomly_initialised_head_must_be_trained(store: Path, tmp_path: Path) -> None:
    raw = make("bert", store, tmp_path / "base")
    save_bert(tmp_path / "body", BertModel)
    raw["start_from"] = {"folder": str(tmp_path / "body"), "new_heads": True, "drop_heads": True}
    with pytest.raises(
        UserError, match=r"has no cls\.predictions\.bias, .*would be randomly initialised and, with lora, never"
    ):
        trainer(raw, tmp_path / "run")


def test_model_types_that_peft_does_not_know_need_target_modules(tmp_path: Path) -> None:
    module, parameters, _ = toy_module("modernbert", "masked", {"target_modules": None})
    with pytest.raises(UserError, match=r"no default for models of type modernbert; name linear layers .*: Wqkv, Wo"):
        lora.add_adapters(module, parameters.lora, seed=parameters.seed)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, parameters, _ = toy_module("gpt2", "causal", {})
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match=r'pip install "terakoya\[lora\]"'):
        lora.add_adapters(module, parameters.lora, seed=parameters.seed)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"type": "masked_lm"},
    "causal": {"type": "causal_lm"},
    "discriminator": {"type": "replaced_token", "generator_size": "1/2", "sharing": "none"},
    "seq2seq": {"type": "span_corruption"},
}


def toy_module(name: str, head: str, chosen: Mapping[str, Any]) -> tuple[torch.nn.Module, Parameters, dict[str, Any]]:
    """A module of the architecture `name` at toy size, parameters that adapt it, and their JSON."""
    architecture = small.settings(registry().component("architectures", name)).model_dump(mode="json")
    raw = {
        "data": {"train": ["nowhere"], "sequence_length": small.SEQUENCE_LENGTH},
        "architecture": {"type": name, **architecture},
        "objective": OBJECTIVES[head],
        "optimizer": {"type": "adamw"},
        "schedule": {"type": "linear"},
        "batch_size": {"-1": 4},
        "max_steps": 1,
        "start_from": "nowhere",
        "lora": {**ADAPTERS, "target_modules": "all-linear", **chosen},
    }
    parameters = Parameters.from_dict(raw, source="test")
    return build_module(parameters, small.VOCABULARY), parameters, raw


def pairs() -> list[tuple[str, str]]:
    known = [(name, registry().component("architectures", name).heads) for name in registry().names("architectures")]
    return [(name, head) for name, heads in known for head in sorted(heads & OBJECTIVES.keys())]


@pytest.mark.parametrize(
    ("name", "head"), at_night(pairs(), always=[("gpt2", "causal"), ("modernbert", "masked"), ("t5", "seq2seq")])
)
def test_any_architecture_is_adapted_and_merged(name: str, head: str) -> None:
    """Adapts every linear layer except the head of every model in the module; merging gives the same model."""
    module, parameters, _ = toy_module(name, head, {})
    plain = [each for each, _ in module.named_parameters()]
    lora.add_adapters(module, parameters.lora, seed=parameters.seed)
    trained = [each for each, value in module.named_parameters() if value.requires_grad]
    assert trained and all(".lora_" in each for each in trained)
    again, _, _ = toy_module(name, head, {})
    torch.manual_seed(99)
    lora.add_adapters(again, parameters.lora, seed=parameters.seed)
    for (one, value), (other, same) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert one == other and torch.equal(value, same), "initialised from the seed alone"
    with torch.no_grad():
        for value in module.parameters():
            if value.requires_grad:
                value.normal_(std=0.2)
    before = outputs(module)
    lora.merge_adapters(module)
    after = outputs(module)
    assert [each for each, _ in module.named_parameters()] == plain
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert (value - after[key]).abs().max() < 1e-4 * max(1.0, float(value.abs().max())), key
    untouched = outputs(again)
    assert any((value - untouched[key]).abs().max() > 1e-3 for key, value in after.items())


def outputs(module: torch.nn.Module) -> dict[str, Tensor]:
    """The first output of each Transformers model in `module` for some tokens."""
    found = {}
    ids = torch.randint(6, small.VOCABULARY.size, (2, 16), generator=torch.Generator().manual_seed(0))
    module.eval()
    for number, model in enumerate(lora.top_level_models(module)):
        extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            found[f"{number} {type(model).__name__}"] = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), **extra
            )[0]
    return found
