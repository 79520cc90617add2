"""The tutorials, followed by a reader: files are written and commands are run, in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import ROOT
from typer.testing import CliRunner

from terakoya.commands.main import app
from terakoya.plugins import loading as plugins

PART = re.compile(r"<!-- (file: (\S+)|run|python) -->\n```\w*\n(.*?)^```", re.S | re.M)
FIRST_TRY = "terakoya plugins check mobile_bert.py"
"""The command that the tutorial expects to fail when it is run for the first time."""

READERS = [
    ["tutorials/japanese-bert.md", "tutorials/continued-pretraining.md", "tutorials/slurm.md"],
    ["tutorials/electra.md"],
    ["tutorials/gpt.md", "tutorials/instruction-tuning.md"],
    ["tutorials/new-architecture.md"],
]
"""Pages that a reader follows one after the other, in one folder."""


def follow(page: str, folder: Path) -> None:
    """Writes the files and runs the commands and programs of `page`; fails with the output of what fails."""
    commands: list[str] = []
    for kind, name, content in PART.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if kind.startswith("file"):
            (folder / name).write_text(content, encoding="utf-8")
        elif kind == "python":
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            (folder / "program.py").write_text(content, encoding="utf-8")
            done = subprocess.run([sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True,
                                  text=True, timeout=600, check=False)  # fmt: skip
            assert done.returncode == 0, f"{page}\n{content}\n{done.stdout}\n{done.stderr}"
        else:
            for line in content.splitlines():
                expected = 2 if line == FIRST_TRY and line not in commands else 0
                commands.append(line)
                run(shlex.split(line), expected)
    assert commands


def run(words: list[str], expected: int) -> None:
    """Runs `cp` or a terakoya command: in this process, with its plugins loaded as in a new one; a check of a plugin in
    a new process, because a file that is written again is another module only there."""
    if words[0] == "cp":
        shutil.copyfile(words[1], words[2])
        return
    assert words[0] == "terakoya", words
    if words[1:3] == ["plugins", "check"]:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == expected, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_current", None)
        patch.setenv(plugins.PLUGINS_VARIABLE, "")
        result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == expected, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"


@pytest.mark.nightly
@pytest.mark.parametrize("pages", READERS, ids=lambda pages: pages[0])
def test_every_command_of_the_page_works(pages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("core", "parameters"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copyfile(ROOT / "core" / "terakoya" / "pipeline" / "demo_corpus.txt", tmp_path / "corpus.txt")
    monkeypatch.chdir(tmp_path)
    for page in pages:
        follow(page, tmp_path)


@pytest.mark.nightly
def test_the_road_of_the_readme_ends_with_a_model_to_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four steps in place of 200."""
    shutil.copyfile(ROOT / "core" / "terakoya" / "pipeline" / "demo_corpus.txt", tmp_path / "corpus.txt")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    road = [line for block in blocks for line in block.splitlines() if line.startswith("terakoya ")]
    verbs = [line.split()[1] for line in road]
    assert verbs == ["doctor", "init", "run", "tokenizer", "prepare", "train", "export", "try", "upload", "upload"]
    run(shlex.split(f"{road[1]} --family bert --goal try"), 0)
    for line in road[3:-1]:  # `doctor` depends on the machine, `run` is the same road for hours, the last one pushes
        run(shlex.split(line.replace("max_steps=200", "max_steps=4 --set schedule.warmup_steps=1")), 0)
    assert (tmp_path / "work" / "published" / "README.md").is_file()


def test_no_tutorial_is_left_out() -> None:
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    followed = {page for pages in READERS for page in pages}
    assert {page for page in written if not page.endswith(".ja.md")} == followed


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.ja.md")), ids=lambda page: page.name)
def test_a_translation_has_the_same_files_and_commands(page: Path) -> None:
    english, japanese = (PART.findall(path.read_text(encoding="utf-8"))
                         for path in (page.with_name(page.name.replace(".ja.", ".")), page))  # fmt: skip
    assert english and english == japanese
