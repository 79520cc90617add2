"""Imported checkpoints of Megatron-LM give, in plain Transformers, the logits of the original model."""

from __future__ import annotations

from pathlib import Path

import megatron_layouts
import published_layouts as layouts
import pytest
import torch
from selection import at_night
from transformers import AutoModelForCausalLM

from terakoya.errors import UserError
from terakoya_megatron.importer import MegatronImporter


@pytest.mark.parametrize("name", layouts.MODELS)
@pytest.mark.parametrize(("tp", "pp"), at_night([(1, 1), (2, 1), (1, 2), (4, 4)], always=[(1, 1), (4, 4)]))
def test_any_tensor_and_pipeline_size_gives_the_models_logits(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    source = megatron_layouts.megatron(layouts.model(name), tmp_path / "in", tp=tp, pp=pp, engine=tp == 2)
    MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model(name))


def test_an_iterations_folder_is_imported_and_padding_is_kept_if_the_vocabulary_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=2, pp=1)
    with caplog.at_level("WARNING", logger="terakoya"):
        MegatronImporter().read(source / "iter_0000042", tmp_path / "out")
    assert "has 256 pieces, padding included" in caplog.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded.config.vocab_size == 256
    assert torch.equal(layouts.logits(loaded.eval())[..., :150], layouts.logits(layouts.model("llama")))


def rewrite(folder: Path, change: object) -> None:
    """Applies `change` to the content of every rank's file in `folder`."""
    for file in folder.rglob("*.pt"):
        content = torch.load(file, weights_only=False)
        change(content)  # type: ignore[operator]
        torch.save(content, file)


def test_the_layers_of_a_virtual_pipeline_are_ordered(tmp_path: Path) -> None:
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=2)
    files = sorted(source.rglob("*.pt"))
    first, second = (torch.load(file, weights_only=False) for file in files)
    layers = [
        {name[17:]: value for name, value in stage["model"].items() if name.startswith(f"decoder.layers.{layer}.")}
        for stage in (first, second)
        for layer in (0, 1)
    ]
    rest = [
        {name: value for name, value in stage["model"].items() if "layers" not in name} for stage in (first, second)
    ]
    for stage, content in enumerate((first, second)):  # stage 0 runs layers 0 and 2, stage 1 layers 1 and 3
        del content["model"]
        for chunk in (0, 1):
            weights = layers[2 * chunk + stage]
            content[f"model{chunk}"] = {f"decoder.layers.0.{name}": value for name, value in weights.items()}
    first["model0"] |= rest[0]
    second["model1"] |= rest[1]
    for file, content in zip(files, (first, second), strict=True):
        torch.save(content, file)
    MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts is 8: a mixture of experts"),
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"qk_layernorm": True}, "norms of queries and keys"),
        ({"rotary_interleaved": True}, "interleaved rotary"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"swiglu": False}, "expected a Llama .* or a GPT-2 .* swiglu False"),
        ({"add_qkv_bias": True}, "add_qkv_bias"),
        ({"num_layers": None}, "have no num_layers"),
    ],
)
def test_other_models_are_errors_that_name_the_argument(changes: dict, message: str, tmp_path: Path) -> None:
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=1, **changes)
    with pytest.raises(UserError, match=message):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    source = megatron_layouts.megatron(layouts.model("gpt2"), tmp_path / "a", tp=1, pp=1)
    rewrite(source, lambda content: content["model"].pop("decoder.layers.2.mlp.linear_fc2.bias"))
    with pytest.raises(UserError, match=r"lacks transformer\.h\.2\.mlp\.c_proj\.bias"):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron(layouts.model("gpt2"), tmp_path / "b", tp=1, pp=1)
    rewrite(source, lambda content: content["model"].update({"decoder.layers.1.mlp.router.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"unknown weights: decoder\.layers\.1\.mlp\.router\.weight"):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron(layouts.model("gpt2"), tmp_path / "c", tp=1, pp=1, num_layers=3)
    with pytest.raises(UserError, match=r"has no place for: transformer\.h\.3\."):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron(layouts.model("gpt2"), tmp_path / "d", tp=1, pp=1, ffn_hidden_size=64)
    with pytest.raises(
        UserError, match=r"another shape: transformer\.h\.0\.mlp\.c_fc\.bias is \(48,\), expected \(64,\)"
    ):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")


def test_missing_and_differing_ranks_are_named(tmp_path: Path) -> None:
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "a", tp=2, pp=2)
    (source / "iter_0000042/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(UserError, match=r"mp_rank_01_001: expected model_optim_rng\.pt or model_rng\.pt"):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    (source / "iter_0000042/mp_rank_01_001").rmdir()
    with pytest.raises(UserError, match=r"of 2 x 2 ranks, these are missing: tensor 1 pipeline 1"):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "b", tp=2, pp=1)
    file = source / "iter_0000042/mp_rank_01/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.3.input_layernorm.weight"] += 1
    torch.save(content, file)
    with pytest.raises(
        UserError, match=r"layers\.3\.input_layernorm\.weight should be the same on all tensor-parallel ranks"
    ):
        MegatronImporter(vocab_size=150).read(source, tmp_path / "out")


def test_other_formats_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        MegatronImporter().read(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="found neither"):
        MegatronImporter().read(tmp_path, tmp_path / "out")
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=1)
    (source / "iter_0000042/metadata.json").write_text("{}")
    with pytest.raises(UserError, match="distributed format"):
        MegatronImporter().read(source, tmp_path / "out")
    (source / "iter_0000042/metadata.json").unlink()
    rewrite(source, lambda content: content.update({"model": {"language_model": {}}}))
    with pytest.raises(UserError, match="before Megatron-Core"):
        MegatronImporter().read(source, tmp_path / "out")
    with pytest.raises(UserError, match=r"has 256 pieces, fewer than the vocabulary's 300"):
        megatron_layouts.megatron(layouts.model("llama"), tmp_path / "small", tp=1, pp=1)
        MegatronImporter(vocab_size=300).read(tmp_path / "small", tmp_path / "out")
