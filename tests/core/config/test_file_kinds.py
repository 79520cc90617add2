"""Files in the wrong place: what each is, and what to do with it; JSON that is none, with the right line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.json_settings import read_json, read_settings
from terakoya_pipeline.settings import read_pipeline

ROOT = Path(__file__).resolve().parents[3]
PRESETS = ROOT / "parameters"
PIPELINE = {
    "corpus": "c.jsonl", "tokenizer_folder": "w/tok", "store": "w/store", "parameters": "p.json", "run": "w/run",
    "export": "w/model",
}  # fmt: skip


def write(folder: Path, content: Any, name: str = "given.json") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2), encoding="utf-8")
    return file


def refusal(read: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(*arguments)
    return str(caught.value)


def test_a_key_of_the_parameter_file_in_a_pipeline(tmp_path: Path) -> None:
    said = refusal(read_pipeline, write(tmp_path, {**PIPELINE, "max_steps": 4}))
    assert said.startswith("given.json: max_steps: unknown key; it belongs into the parameter file")


@pytest.mark.parametrize(
    ("content", "kind", "do"),
    [
        ({"model_type": "bert", "hidden_size": 64}, "the configuration of a Transformers model", '"start_from": "'),
        ({"corpora": {}, "tokenizer": {}, "unknown": 1}, "a pipeline file", "start it with `terakoya run "),
        ({"tokenizer_class": "BertTokenizer"}, "the configuration of a tokenizer", "terakoya prepare"),
        ({"zero_optimization": {"stage": 2}}, "a DeepSpeed configuration", '"deepspeed_config": "'),
        ({"output_dir": "x", "num_train_epochs": 3}, "TrainingArguments of Transformers", "num_train_epochs: epochs"),
        ({"base_model": "x", "sequence_len": 64}, "a configuration of axolotl", "sequence_len: data.sequence_length"),
        ({"stage": "pt", "cutoff_len": 64}, "a configuration of LLaMA-Factory", "cutoff_len: data.sequence_length"),
        ({"step": 4, "parameters": {}, "stores": {}}, "a checkpoint's manifest", "terakoya train RUN/parameters.json"),
        ({"tokens": 4, "documents": 1, "vocabulary": {}}, "a token store's record", '"data": {"train": ["'),
    ],
)  # fmt: skip
def test_another_kind_of_file_is_recognised(tmp_path: Path, content: dict[str, Any], kind: str, do: str) -> None:
    said = refusal(Parameters.load, write(tmp_path, content))
    assert f"expected a parameter file, got {kind}; " in said and do in said


def test_entries_of_language_pretraining_need_a_name(tmp_path: Path) -> None:
    said = refusal(Parameters.load, write(tmp_path, {"bert-small": {"number-of-layers": 2}, "bert-base": {}}))
    assert "got a parameter.json of retarfi/language-pretraining; choose one of its entries: --model-type bert-" in said


def test_yaml_of_another_trainer_and_of_ones_own(tmp_path: Path) -> None:
    axolotl = write(tmp_path, "# mine\nbase_model: x\nmicro_batch_size: 2\nlearning_rate: 0.1\n", "a.yml")
    assert "got a configuration of axolotl; " in refusal(Parameters.load, axolotl)
    assert "\n  learning_rate: optimizer.learning_rate" in refusal(Parameters.load, axolotl)
    own = write(tmp_path, "data:\n  train: [store]\narchitecture:\n  type: bert\n", "own.json")
    for read in (Parameters.load, read_pipeline):
        assert ": is YAML; give it a name that ends in .yaml, such as own.yaml" in refusal(read, own)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "a": 1,\n  "b": 2,\n}', ":3:9: not valid JSON: a comma before the closing }; remove the comma"),
        ('{"a": [1, 2,]}', ":1:12: not valid JSON: a comma before the closing ]; remove the comma"),
        ('{\n  "a": 1\n  "b": 2\n}', ':2:9: not valid JSON: expected a comma before "b": 2; add it here'),
        ('{\n  "a": 1, // why\n  "b": 2\n}', ":2:11: not valid JSON: a comment, which this file cannot have"),
        ("// why\n{}", ":1:1: not valid JSON: a comment, "),
        ('{"a": 1 # why\n}', ":1:9: not valid JSON: a comment; "),
        ("{'a': 1}", ":1:2: not valid JSON: 'a': 1}: JSON has \"double quotes\" round names and texts"),
        ('{"a": None}', ":1:7: not valid JSON: None: JSON writes null"),
        ('{"a": True}', ":1:7: not valid JSON: True: JSON writes true"),
        ('{"a": {"b": 1}', ":1:15: not valid JSON: the file ends too early; "),
        ('{"a": "b}', ':1:7: not valid JSON: "b}: the quote is not closed in its line; '),
        ('{"a": x}', ":1:7: not valid JSON: Expecting value, got x}"),
        ("", ": is empty; expected a JSON object"),
        (" \n", ": is empty; expected a JSON object"),
        ("[1, 2]", ": expected a JSON object, got [1, 2]"),
        ('{"seed": NaN}', ":1:10: expected a number, got NaN"),
    ],
)
def test_what_is_not_json_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    assert refusal(read_json, file).startswith(f"{file}{said}")
    if "comma before the closing" not in said and not re.search("//", text):
        assert refusal(read_settings, file).startswith(f"{file}{said}")
