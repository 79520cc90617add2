"""`terakoya import`, `export` and `parameters import` of Megatron's formats, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_layouts
import published_layouts as layouts
import pytest
import torch
from command_line import call
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layouts.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_tokenizers_size_removes_padding_and_its_files_are_copied(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = megatron_layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=2, pp=2)
    out = tmp_path / "deeper" / "out"
    code, output, _ = call(capsys, "import", "megatron", source, "--tokenizer", tokenizer, "--out", out)
    assert code == 0
    parameters = sum(value.numel() for value in layouts.model("llama").parameters())
    assert f"{parameters:,} parameters, 150 pieces\n" in output
    assert f'model = LlamaForCausalLM.from_pretrained("{out}")' in output
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert torch.equal(layouts.logits(loaded.eval()), layouts.logits(layouts.model("llama")))
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (1, 2)
    assert loaded.generation_config.eos_token_id == 2
    assert len(AutoTokenizer.from_pretrained(out, local_files_only=True)) == 150
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_settings_of_a_format_are_given_as_flags_or_with_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(megatron_layouts.smdistributed(megatron_layouts.gptj()), tmp_path / "fullmodel.pt")
    sizes = ["--num-attention-heads", "4", "--max-position-embeddings=40"]
    arguments = ["import", "smdistributed", tmp_path, *sizes, "--set", "rotary_dim=4", "--out", tmp_path / "out"]
    code, output, _ = call(capsys, *arguments)
    assert code == 0 and "without a tokenizer" in output
    layouts.same(tmp_path / "out", megatron_layouts.gptj())
    code, _, error = call(capsys, *arguments)
    assert code == 2 and "already exists" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "megatrn", "x"], 'did you mean "megatron"'),
        (["import", "megatron", "x", "--vocab", "3"], "importer megatron: vocab: unknown key"),
        (["import", "megatron", "x", "--vocab-size", "three"], "--vocab-size: expected an integer"),
        (["import", "megatron", "nowhere"], "nowhere: no such folder"),
        (["export", "x", "--format", "megatron", "--tp", "two"], "--tp: expected an integer"),
    ],
)
def test_wrong_input_says_what_to_do(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = call(capsys, *arguments, "--out", tmp_path / "out")
    assert code == 2 and message in error, error
    assert not (tmp_path / "out").exists()


def test_export_and_import_on_the_command_line_give_the_same_weights(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "model"
    layouts.model("llama").save_pretrained(source)
    for file in tokenizer.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    arguments = ["export", source, "--format", "megatron", "--tp", "2", "--pp", "2", "--out", tmp_path / "megatron"]
    code, output, _ = call(capsys, *arguments)
    assert code == 0 and output == f"exported {source} to {tmp_path / 'megatron'}\n"
    back = ["import", "megatron", tmp_path / "megatron", "--tokenizer", tmp_path / "megatron/tokenizer"]
    assert call(capsys, *back, "--out", tmp_path / "back")[0] == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (source, tmp_path / "back")]
    assert weights[0] == weights[1]


def test_a_script_becomes_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tree_sitter_bash")
    script = tmp_path / "run.sh"
    script.write_text(
        "L=$(cat layers)\n"
        "python pretrain_gpt.py --num-layers $L --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\\n"
        "  --max-position-embeddings 64 --global-batch-size 8 --lr 1e-3 --train-iters 9 --data-path s \\\n"
        "  --expert-model-parallel-size 2\n"
    )
    out = tmp_path / "run.json"
    code, _, report = call(capsys, "parameters", "import", "megatron", script, "--out", out)
    assert code == 0 and "num_hidden_layers" not in out.read_text()
    assert "$(cat layers)" in report and "--expert-model-parallel-size" in report and "2 not supported" in report
    again = ["parameters", "import", "megatron", script, "--define", "L=3"]
    code, output, report = call(capsys, *again)
    assert code == 0 and json.loads(output)["architecture"]["num_hidden_layers"] == 3
    assert "1 not supported" in report and "to complete before" not in report and "describe a causal" not in report
    script.write_text(script.read_text().replace("pretrain_gpt.py", "megatron/pretrain_bert.py"))
    assert "megatron/pretrain_bert.py is no pretrain_gpt.py" in call(capsys, *again)[2].replace("\n", " ")
    assert call(capsys, *again, "--out", out)[0] == 2  # the file exists
    code, _, error = call(capsys, "parameters", "import", "deepspeed", script)
    assert code == 2 and "reads checkpoints, no scripts" in error
    code, _, error = call(capsys, "parameters", "import", "megatron", script, "--define", "L")
    assert code == 2 and "expected NAME=VALUE" in error


SCRIPTS = """
from terakoya import hookimpl
from terakoya.components import Importer
from terakoya_megatron.converted_config import ConvertedConfig

class Recipes(Importer):
    def parameters(self, file):
        return ConvertedConfig({"max_steps": int(file.read_text())}, {"steps": "max_steps"}, {}, {})

@hookimpl
def register_importers():
    return {"recipes": Recipes}
"""


@pytest.mark.usefixtures("fresh_plugins")
def test_scripts_of_another_plugins_format_become_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes.py").write_text(SCRIPTS)
    (tmp_path / "run.txt").write_text("9")
    words = ["--plugin", tmp_path / "recipes.py", "parameters", "import", "recipes", tmp_path / "run.txt"]
    code, output, report = call(capsys, *words)
    assert code == 0 and json.loads(output) == {"max_steps": 9} and "1 options are mapped" in report
