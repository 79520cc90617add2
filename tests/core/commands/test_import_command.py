"""`terakoya import` and `export` with settings, as a user types them."""

from __future__ import annotations

from pathlib import Path

import published_layouts as layouts
import pytest
from command_line import call


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layouts.tokenizer(tmp_path_factory.mktemp("tokenizer"))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "deepspeed"], "expected a format (deepspeed"),
        (["import", "deepspeed", "x", "y"], "expected one checkpoint after the format, got x y"),
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
