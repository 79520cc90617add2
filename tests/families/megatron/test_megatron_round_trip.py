"""An export for Megatron-LM has the published layout, and importing it gives identical weights."""

from __future__ import annotations

import math
from pathlib import Path

import megatron_layouts
import published_layouts as layouts
import pytest
import torch
from selection import at_night
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM

from terakoya import export
from terakoya.errors import UserError
from terakoya.toolkit.formats import restricted_unpickler
from terakoya_megatron.exporter import MegatronExporter
from terakoya_megatron.importer import MegatronImporter


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer's folder with one file."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", layouts.MODELS)
@pytest.mark.parametrize(("tp", "pp"), at_night([(1, 1), (2, 2), (4, 1), (1, 4)], always=[(2, 2)]))
def test_an_export_is_imported_with_identical_weights(
    name: str, tp: int, pp: int, tmp_path: Path, tokenizer: Path
) -> None:
    model = layouts.model(name)
    MegatronExporter(tp=tp, pp=pp).export({"": model}, tokenizer, tmp_path / "out")
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()
    MegatronImporter(vocab_size=150).read(tmp_path / "out", tmp_path / "back")
    layouts.same(tmp_path / "back", model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 1)])
def test_every_file_has_the_published_layout(
    name: str, engine: bool, tp: int, pp: int, tmp_path: Path, tokenizer: Path
) -> None:
    model = layouts.model(name)
    published = megatron_layouts.megatron(model, tmp_path / "published", tp=tp, pp=pp, engine=engine)
    implementation = "transformer_engine" if engine else "local"
    ours = tmp_path / "ours"
    MegatronExporter(tp=tp, pp=pp, iteration=42, transformer_impl=implementation).export({"": model}, tokenizer, ours)
    files = sorted(path.relative_to(published) for path in published.rglob("*.pt"))
    assert files == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
    for file in files:
        expected, got = restricted_unpickler.load(published / file), restricted_unpickler.load(ours / file)
        weights = [
            {key: value for key, value in content["model"].items() if value is not None} for content in (expected, got)
        ]
        assert weights[0].keys() == weights[1].keys()
        for key, value in weights[0].items():
            rank = int(file.parts[1][8:10])
            real = max(0, min(len(value), 150 - rank * len(value))) if "word" in key or "output" in key else len(value)
            assert value.shape == weights[1][key].shape
            assert torch.equal(value[:real], weights[1][key][:real]), key
        published_arguments, arguments = vars(expected["args"]), vars(got["args"])
        differing = {
            key for key in published_arguments.keys() & arguments.keys() if published_arguments[key] != arguments[key]
        }
        assert differing <= {"init_method_std", "num_query_groups"}  # ignored without grouped queries
    assert (ours / "latest_checkpointed_iteration.txt").read_text() == "42"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_vocabulary_is_padded_to_128_times_the_tensor_size(tp: int, tmp_path: Path, tokenizer: Path) -> None:
    MegatronExporter(tp=tp).export({"": layouts.model("llama")}, tokenizer, tmp_path / "out")
    rows = 0
    for rank in range(tp):
        content = restricted_unpickler.load(tmp_path / f"out/iter_0000001/mp_rank_{rank:02d}/model_optim_rng.pt")
        assert (
            content["model"]["output_layer.weight"].shape == content["model"]["embedding.word_embeddings.weight"].shape
        )
        rows += len(content["model"]["output_layer.weight"])
    assert rows == math.ceil(150 / (128 * tp)) * 128 * tp == content["args"].padded_vocab_size


def test_a_transformers_folder_is_exported_with_its_tokenizer_and_dtype(tmp_path: Path) -> None:
    model = LlamaForCausalLM(layouts.model("llama").config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    done = export(tmp_path / "model", tmp_path / "out", format="megatron", settings={"tp": 2, "pp": 4})
    assert done.models == {} and done.step is None
    # without tokenizer_config.json AutoTokenizer finds the tokenizer's class by the model's config
    assert sorted(path.name for path in (tmp_path / "out/tokenizer").iterdir()) == ["config.json", "tokenizer.json"]
    assert (
        restricted_unpickler.load(tmp_path / "out/iter_0000001/mp_rank_01_003/model_optim_rng.pt")["args"].bf16 is True
    )
    MegatronImporter(vocab_size=150).read(tmp_path / "out", tmp_path / "back")
    imported = LlamaForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True)
    assert imported.dtype == torch.bfloat16
    assert all(torch.equal(value, imported.state_dict()[name]) for name, value in model.state_dict().items())


def test_unsupported_sizes_and_models_are_errors(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match="tp 3 does not divide the model's attention heads, 8"):
        MegatronExporter(tp=3).export({"": layouts.model("llama")}, tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="tp 8 does not divide the model's heads of keys and values, 4"):
        MegatronExporter(tp=8).export({"": layouts.model("llama")}, tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="pp 3 does not divide the model's layers, 4"):
        MegatronExporter(pp=3).export({"": layouts.model("llama")}, tokenizer, tmp_path / "out")
    small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(UserError, match="supports LlamaForCausalLM and GPT2LMHeadModel, got BertForMaskedLM"):
        MegatronExporter().export({"": BertForMaskedLM(small)}, tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="format megatron: tq: unknown key"):
        export(tmp_path, tmp_path / "out", format="megatron", settings={"tq": 2})
    relu = layouts.model("gpt2").config.__class__(
        **{**layouts.model("gpt2").config.to_dict(), "activation_function": "relu"}
    )
    with pytest.raises(UserError, match="cannot describe GPT2LMHeadModel with activation_function relu"):
        MegatronExporter().export({"": layouts.GPT2LMHeadModel(relu)}, tokenizer, tmp_path / "out")
