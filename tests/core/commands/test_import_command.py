"""`terakoya import`, `export` with settings and `parameters import`, as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from terakoya.commands.main import main

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
import published_layouts as layouts


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Runs the command line in this process; returns its exit code, output and error output."""
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 150 pieces that plain Transformers loads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 150)}
    tokenizer = Tokenizer(models.WordLevel(pieces, "<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def test_the_tokenizers_size_removes_padding_and_its_files_are_copied(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = layouts.megatron(layouts.model("llama"), tmp_path / "in", tp=2, pp=2)
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


def test_a_tokenizer_that_does_not_fit_is_refused(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = layouts.zero(layouts.llama(vocab_size=140), tmp_path / "in", stage=2, processes=1)
    code, _, error = call(capsys, "import", "deepspeed", source, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert code == 2
    assert "the tokenizer has 150 pieces, but the checkpoint has embeddings for 140" in " ".join(error.split())
    assert not (tmp_path / "out").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    code, _, error = call(capsys, "import", "deepspeed", source, "--tokenizer", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "expected a tokenizer that Transformers loads" in error


def test_settings_of_a_format_are_given_as_flags_or_with_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(layouts.smdistributed(layouts.gptj()), tmp_path / "fullmodel.pt")
    sizes = ["--num-attention-heads", "4", "--max-position-embeddings=40"]
    arguments = ["import", "smdistributed", tmp_path, *sizes, "--set", "rotary_dim=4", "--out", tmp_path / "out"]
    code, output, _ = call(capsys, *arguments)
    assert code == 0 and "without a tokenizer" in output
    layouts.same(tmp_path / "out", layouts.gptj())
    code, _, error = call(capsys, *arguments)
    assert code == 2 and "already exists" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "megatron"], "expected a format (deepspeed, megatron, megatron_deepspeed, smdistributed"),
        (["import", "megatrn", "x"], 'did you mean "megatron"'),
        (["import", "megatron", "x", "--vocab", "3"], "importer megatron: vocab: unknown key"),
        (["import", "megatron", "x", "--vocab-size", "three"], "--vocab-size: expected an integer"),
        (["import", "megatron", "x", "y"], "expected one checkpoint after the format, got x y"),
        (["import", "megatron", "nowhere"], "nowhere: no such folder"),
        (["export", "x", "--format", "megatron", "--tp", "two"], "--tp: expected an integer"),
        (["export", "x", "--format", "huggingface", "--tp", "2"], "format huggingface: tp: unknown key"),
        (["export", "x", "y"], "expected one run, checkpoint or folder, got x y"),
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


@pytest.mark.slow
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
    assert "1 not supported" in report and "to complete before" not in report
    assert call(capsys, *again, "--out", out)[0] == 2  # the file exists
    code, _, error = call(capsys, "parameters", "import", "deepspeed", script)
    assert code == 2 and "reads checkpoints, no scripts" in error
    code, _, error = call(capsys, "parameters", "import", "megatron", script, "--define", "L")
    assert code == 2 and "expected NAME=VALUE" in error
