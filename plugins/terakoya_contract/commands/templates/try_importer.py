"""The import format `example` meets the requirements of its kind, and copies the weights unchanged."""

from pathlib import Path

import torch
from terakoya import plugins
from terakoya_contract import problems
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_an_importer() -> None:
    assert problems(PLUGIN) == []


def test_the_weights_have_their_new_names(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = BertForMaskedLM(config)
    config.save_pretrained(tmp_path)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in model.state_dict().items()}
    torch.save(old, tmp_path / "pytorch_model.bin")
    plugins.load([str(PLUGIN)]).component("importers", "example")().read(tmp_path, tmp_path / "out")
    loaded = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", local_files_only=True, trust_remote_code=False
    ).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
