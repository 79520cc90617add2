"""The export format `example` meets the requirements of its kind, and lists the files that it writes."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems, toy
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_an_exporter() -> None:
    assert problems(PLUGIN) == []


def test_transformers_loads_it_and_the_list_names_its_files(tmp_path: Path) -> None:
    exporter = plugins.load([str(PLUGIN)]).component("exporters", "example")()
    config = BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    exporter.export({"": BertForMaskedLM(config)}, toy.make_tokenizer(tmp_path / "tokenizer"), tmp_path / "out")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "out", local_files_only=True, trust_remote_code=False)
    assert "  model.safetensors\n" in (tmp_path / "out" / "SHA256SUMS").read_text(encoding="utf-8")
