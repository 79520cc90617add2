"""The pages about plugins, followed at night by a newcomer, who writes every file and runs every command, in order."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documented_commands import ROOT
from followed_pages import blocks_of
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.plugins import loading as plugins
from terakoya.plugins.run_record import record_plugins
from terakoya.toolkit.tokenizers.line_encoder import LineEncoder
from terakoya_contract.toy import make_tokenizer
from terakoya_inference.predictions import fill_mask

PAGES = ("plugins/README.md", "docs/reference/plugins.md")
TEXT = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FILES = {block.what: block.content for block in BLOCKS if block.kind == "file"}


class Reader:
    """A reader who follows the pages in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}
        """Command or program -> its output."""

    def follow(self) -> None:
        """Writes all files and runs all commands, in order. Fails with the output of a command that fails."""
        for block in BLOCKS:
            if block.kind == "file":
                (self.folder / block.what).parent.mkdir(exist_ok=True)
                (self.folder / block.what).write_text(block.content, encoding="utf-8")
            elif block.kind == "python":
                self.printed[block.content] = self.program(block.content)
            elif block.kind == "run":
                for line in block.content.splitlines():
                    self.printed[line] = self.command(shlex.split(line))

    def command(self, words: list[str]) -> str:
        """Runs one command, with its plugins loaded as in a new process; returns its output."""
        assert words[0] == "terakoya"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugins, "_current", None)
            patch.setenv(plugins.PLUGINS_VARIABLE, "")
            result = CliRunner().invoke(build_app(), words[1:], catch_exceptions=True)
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"
        return result.output

    def program(self, content: str) -> str:
        """Runs a Python program in a process without terakoya and network; returns its output."""
        program = content + "\nimport sys\nassert 'terakoya' not in sys.modules\n"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(self.folder / "modules")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has followed both pages with the bundled corpus."""
    reader = Reader(tmp_path_factory.mktemp("page"))
    shutil.copyfile(ROOT / "core" / "terakoya" / "corpus" / "demo_corpus.txt", reader.folder / "corpus.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(reader.folder)
        reader.follow()
        yield reader


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.nightly
def test_the_architecture_has_at_most_30_lines_and_learns(reader: Reader) -> None:
    assert len(FILES["albert.py"].splitlines()) <= 30
    values = losses(reader.folder / "work" / "albert")
    assert values[-1] < values[0] - 0.5
    checked = reader.printed["terakoya plugins check albert.py"]
    assert ", 0 failed" in checked and "architecture albert" in checked
    config = json.loads((reader.folder / "work" / "albert-model" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["AlbertForMaskedLM"] and config["hidden_size"] == 64
    assert "[MASK] 1" in next(text for line, text in reader.printed.items() if " try " in line)


@pytest.mark.nightly
def test_the_objective_passes_its_checks_and_learns(reader: Reader) -> None:
    checked = reader.printed["terakoya plugins check denoise.py"]
    assert ", 0 failed" in checked and "objective denoise" in checked
    values = losses(reader.folder / "work" / "denoise")
    assert values[-1] < values[0] - 0.5


@pytest.mark.nightly
def test_the_tokenizer_makes_a_store_of_characters(reader: Reader) -> None:
    assert "tokenizer characters" in reader.printed["terakoya plugins check characters.py"]
    facts = json.loads((reader.folder / "work" / "character-store" / "store.json").read_text(encoding="utf-8"))
    assert facts["vocabulary"]["size"] == 300 and not facts["word_starts"]
    letters = "".join((reader.folder / "corpus.txt").read_text(encoding="utf-8").split())
    assert facts["tokens"] == len(letters)


@pytest.mark.nightly
def test_a_model_of_ones_own_is_exported_with_its_code(reader: Reader) -> None:
    folder = reader.folder / "work" / "averages-model"
    assert (folder / "_modeling_averages.py").read_text(encoding="utf-8") == FILES["averages/_modeling_averages.py"]
    assert "terakoya" not in FILES["averages/_modeling_averages.py"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["auto_map"]["AutoModelForMaskedLM"] == "_modeling_averages.AveragesForMaskedLM"
    values = losses(reader.folder / "work" / "averages")
    assert values[-1] < values[0] - 0.5
    (printed,) = [text for line, text in reader.printed.items() if line.startswith("from transformers")]
    assert re.fullmatch(r"torch\.Size\(\[1, \d+, 3000\]\)\n", printed)
    exported = next(text for line, text in reader.printed.items() if "export work/averages" in line)
    assert "AutoModelForMaskedLM" in exported and "trust_remote_code=True" in exported
    command = ["terakoya", "try", "work/averages-model", "先生は[MASK]を開く。"]
    assert "[MASK] 1" in reader.command([*command, "--trust-remote-code"])
    with pytest.raises(UserError, match=r"its code, _modeling_averages\.py\. Read the code; .* --trust-remote-code"):
        fill_mask(Path(command[2]), command[3])
    # the code belongs to the plugin: a run notices when it changes
    (before,) = recorded(reader.folder / "averages")
    with (reader.folder / "averages" / "_modeling_averages.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    (after,) = recorded(reader.folder / "averages")
    assert before != after


def recorded(plugin: Path) -> list[str]:
    """Returns the hashes of the plugin that a run records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_current", None)
        patch.setenv(plugins.PLUGINS_VARIABLE, "")
        record = record_plugins(plugins.load([str(plugin)]), {"architecture": {"type": plugin.name}})
    return [each["sha256"] for each in record if each["name"] == plugin.name]


@pytest.mark.usefixtures("fresh_plugins")
def test_the_plugins_of_the_pages_load(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    names = ("albert.py", "denoise.py", "characters.py", "diary.py", "averages")
    known = plugins.load([str(tmp_path / name) for name in names])
    assert {name.removesuffix(".py") for name in names} <= {each.name for each in known.plugins}
    components = {("architectures", "albert"), ("objectives", "denoise"), ("architectures", "averages")}
    assert {*components, ("tokenizers", "characters")} <= {(each.kind, each.name) for each in known.components()}


@pytest.fixture
def diary(fresh_plugins: None, tmp_path: Path) -> plugins.Registry:
    """The bundled plugins and the example with events."""
    file = tmp_path / "diary.py"
    file.write_text(FILES["diary.py"], encoding="utf-8")
    return plugins.load([str(file)])


def test_the_event_plugin_writes_its_diary(diary: plugins.Registry, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(rank=0, world_size=2, folder=tmp_path, step=0, consumed_tokens=0)
    diary.hook.run_started(run)
    run.step, run.consumed_tokens = 5, 1280
    diary.hook.checkpoint_saved(run, tmp_path / "checkpoints" / "step-00000005")
    diary.hook.run_finished(run, None)
    lines = (tmp_path / "diary.txt").read_text(encoding="utf-8").splitlines()
    assert [line[21:] for line in lines] == [
        "step 0  started with 2 process(es)",
        "step 5  saved step-00000005 after 1280 tokens",
        "step 5  finished",
    ]
    run.rank = 1
    diary.hook.run_finished(run, KeyboardInterrupt())
    assert len((tmp_path / "diary.txt").read_text(encoding="utf-8").splitlines()) == 3


def definitions(file: str) -> dict[str, Any]:
    """What a file of the pages defines."""
    found: dict[str, Any] = {}
    exec(compile(FILES[file], file, "exec"), found)
    return found


def test_the_additive_mask_hides_padding_alone() -> None:
    mask = definitions("additive_mask.py")["additive_mask"](torch.tensor([[0, 0, -1], [0, 1, 1]]))
    assert mask.shape == (2, 1, 1, 3) and mask.dtype == torch.float32
    scores = torch.zeros(2, 1, 3, 3) + mask
    assert scores.softmax(-1)[:, 0, 0].tolist() == [[0.5, 0.5, 0.0], [pytest.approx(1 / 3)] * 3]


def test_the_encoder_of_the_page_adds_word_starts(tmp_path: Path) -> None:
    inner = LineEncoder(load_tokenizer(make_tokenizer(tmp_path / "words")), parse=True)
    documents = ["w1 w2\nw3", "", "w4"]
    encoded = definitions("every_token_is_a_word.py")["EveryTokenIsAWord"](inner).encode(documents)
    assert inner.encode(documents).word_starts is None
    assert encoded.word_starts.tolist() == [True] * 4 and encoded.line_lengths.tolist() == [2, 1, 1]


def test_names_on_the_page_exist() -> None:
    for name in set(re.findall(r"`(terakoya(?:\.\w+)*)`", TEXT)):
        pkgutil.resolve_name(name)


def test_the_pages_name_every_event_and_every_kind() -> None:
    for hook in [*plugins.EVENTS, *plugins.REGISTER_HOOKS.values()]:
        assert f"`{hook}" in TEXT, hook
