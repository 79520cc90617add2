"""Megatron-LM's checkpoints give, in plain Transformers, the logits of the model they were laid out from."""

from __future__ import annotations

from pathlib import Path

import published_layouts as layouts
import pytest
import torch
from transformers import AutoModelForCausalLM

from terakoya.errors import UserError
from terakoya_plugins.formats.megatron.importer import Megatron


@pytest.mark.parametrize("name", layouts.MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 4)])
def test_any_tensor_and_pipeline_size_gives_the_models_logits(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    source = layouts.megatron(layouts.model(name), tmp_path / "in", tp=tp, pp=pp, engine=tp == 2)
    Megatron(vocab_size=150).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model(name))


def test_one_iteration_is_a_source_too_and_padding_stays_where_the_vocabulary_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=2, pp=1)
    with caplog.at_level("WARNING", logger="terakoya"):
        Megatron().read(source / "iter_0000042", tmp_path / "out")
    assert "holds 256 pieces, padding included" in caplog.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded.config.vocab_size == 256
    assert torch.equal(layouts.logits(loaded.eval())[..., :150], layouts.logits(layouts.model("llama")))


def rewrite(folder: Path, change: object) -> None:
    """Changes what every rank's file of `folder` holds."""
    for file in folder.rglob("*.pt"):
        content = torch.load(file, weights_only=False)
        change(content)  # type: ignore[operator]
        torch.save(content, file)


def test_a_virtual_pipelines_pieces_are_put_in_order(tmp_path: Path) -> None:
    source = layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=2)
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
        for piece in (0, 1):
            own = layers[2 * piece + stage]
            content[f"model{piece}"] = {f"decoder.layers.0.{name}": value for name, value in own.items()}
    first["model0"] |= rest[0]
    second["model1"] |= rest[1]
    for file, content in zip(files, (first, second), strict=True):
        torch.save(content, file)
    Megatron(vocab_size=150).read(source, tmp_path / "out")
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
        ({"num_layers": None}, "lack num_layers"),
    ],
)
def test_what_is_no_llama_and_no_gpt2_is_refused_by_name(changes: dict, message: str, tmp_path: Path) -> None:
    source = layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=1, **changes)
    with pytest.raises(UserError, match=message):
        Megatron(vocab_size=150).read(source, tmp_path / "out")


def test_weights_that_are_missing_or_not_known_are_named(tmp_path: Path) -> None:
    source = layouts.megatron(layouts.model("gpt2"), tmp_path / "a", tp=1, pp=1)
    rewrite(source, lambda content: content["model"].pop("decoder.layers.2.mlp.linear_fc2.bias"))
    with pytest.raises(UserError, match=r"lacks transformer\.h\.2\.mlp\.c_proj\.bias"):
        Megatron(vocab_size=150).read(source, tmp_path / "out")
    source = layouts.megatron(layouts.model("gpt2"), tmp_path / "b", tp=1, pp=1)
    rewrite(source, lambda content: content["model"].update({"decoder.layers.1.mlp.router.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"not known: decoder\.layers\.1\.mlp\.router\.weight"):
        Megatron(vocab_size=150).read(source, tmp_path / "out")
    source = layouts.megatron(layouts.model("gpt2"), tmp_path / "c", tp=1, pp=1, num_layers=3)
    with pytest.raises(UserError, match=r"has no place for: transformer\.h\.3\."):
        Megatron(vocab_size=150).read(source, tmp_path / "out")
    source = layouts.megatron(layouts.model("gpt2"), tmp_path / "d", tp=1, pp=1, ffn_hidden_size=64)
    with pytest.raises(
        UserError, match=r"another shape: transformer\.h\.0\.mlp\.c_fc\.bias is \(48,\), expected \(64,\)"
    ):
        Megatron(vocab_size=150).read(source, tmp_path / "out")


def test_ranks_that_are_missing_or_disagree_are_named(tmp_path: Path) -> None:
    source = layouts.megatron(layouts.model("llama"), tmp_path / "a", tp=2, pp=2)
    (source / "iter_0000042/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(UserError, match=r"mp_rank_01_001: expected model_optim_rng\.pt or model_rng\.pt"):
        Megatron(vocab_size=150).read(source, tmp_path / "out")
    (source / "iter_0000042/mp_rank_01_001").rmdir()
    with pytest.raises(UserError, match=r"of 2 x 2 ranks lacks tensor 1 pipeline 1"):
        Megatron(vocab_size=150).read(source, tmp_path / "out")
    source = layouts.megatron(layouts.model("llama"), tmp_path / "b", tp=2, pp=1)
    file = source / "iter_0000042/mp_rank_01/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.3.input_layernorm.weight"] += 1
    torch.save(content, file)
    with pytest.raises(UserError, match=r"layers\.3\.input_layernorm\.weight differs between tensor-parallel ranks"):
        Megatron(vocab_size=150).read(source, tmp_path / "out")


def test_other_formats_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Megatron().read(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="found neither"):
        Megatron().read(tmp_path, tmp_path / "out")
    source = layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=1, pp=1)
    (source / "iter_0000042/metadata.json").write_text("{}")
    with pytest.raises(UserError, match="distributed format"):
        Megatron().read(source, tmp_path / "out")
    (source / "iter_0000042/metadata.json").unlink()
    rewrite(source, lambda content: content.update({"model": {"language_model": {}}}))
    with pytest.raises(UserError, match="before Megatron-Core"):
        Megatron().read(source, tmp_path / "out")
    with pytest.raises(UserError, match=r"holds 256 pieces, fewer than the vocabulary's 300"):
        layouts.megatron(layouts.model("llama"), tmp_path / "small", tp=1, pp=1)
        Megatron(vocab_size=300).read(tmp_path / "small", tmp_path / "out")
