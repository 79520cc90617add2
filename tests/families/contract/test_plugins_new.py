"""`terakoya plugins new` writes a good start: the tests pass, linting is clean, the package can be installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.components import KINDS
from terakoya_contract.commands.new import SINGULAR, TEMPLATES, new

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str, folder: Path, path: Path | None = None) -> str:
    """Runs a command and returns its output; fails if the command fails."""
    environment = {**os.environ, "PYTHONPATH": str(path or ""), "TERAKOYA_PLUGINS": "", "TERAKOYA_WITHOUT": ""}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_a_template_for_each_kind() -> None:
    assert [f"{kind}s" for kind in SINGULAR] == list(KINDS)
    assert all((TEMPLATES / f"{name}.py").is_file() for kind in SINGULAR for name in (kind, f"try_{kind}"))


def write(kinds: list[str], folder: Path) -> None:
    for kind in kinds:
        done = CliRunner().invoke(build_app(), ["plugins", "new", f"my_{kind}", "--kind", kind, "--out", str(folder)])
        assert done.exit_code == 0 and f"plugins check {folder / f'my_{kind}.py'}" in done.output


@pytest.mark.slow
def test_the_tests_that_it_writes_pass(tmp_path: Path) -> None:
    write(["tracker"], tmp_path)
    assert "2 passed" in run(sys.executable, "-m", "pytest", "-q", "-W", "error", folder=tmp_path)


@pytest.mark.nightly
def test_the_tests_of_every_kind_pass(tmp_path: Path) -> None:
    write(list(SINGULAR), tmp_path)
    assert f"{2 * len(SINGULAR)} passed" in run(sys.executable, "-m", "pytest", "-q", "-W", "error", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_every_kind_is_clean(tmp_path: Path) -> None:
    write(list(SINGULAR), tmp_path)
    config = str(ROOT / "pyproject.toml")
    run(sys.executable, "-m", "ruff", "check", "--config", config, ".", folder=tmp_path)
    run(sys.executable, "-m", "ruff", "format", "--check", "--config", config, ".", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds it, is not installed"
)
def test_an_installed_package_needs_no_plugin_option(tmp_path: Path) -> None:
    files = new("my_model", "architecture", tmp_path, package=True)
    names = [str(file.relative_to(tmp_path)) for file in files]
    assert names == [
        f"terakoya-my-model/{name}" for name in ("pyproject.toml", "terakoya_my_model.py", "test_terakoya_my_model.py")
    ]
    listed, site = installed([files[0].parent], tmp_path)
    assert ["architecture", "my_model", "terakoya_my_model", "terakoya-my-model", "0.1.0"] in listed
    assert not list(site.glob("test_*"))


@pytest.mark.nightly
def test_a_package_of_every_kind_can_be_installed(tmp_path: Path) -> None:
    folders = [new(f"my_{kind}", kind, tmp_path, package=True)[0].parent for kind in SINGULAR]
    listed, _ = installed(folders, tmp_path)
    for kind in SINGULAR:
        assert [kind, f"my_{kind}", f"terakoya_my_{kind}", f"terakoya-my-{kind.replace('_', '-')}", "0.1.0"] in listed


def installed(folders: list[Path], tmp_path: Path) -> tuple[list[list[str]], Path]:
    """Installs the packages `folders`; returns the lines of `terakoya plugins list`, and the folder of the
    installation."""
    site = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
        "--target", str(site), *map(str, folders), folder=tmp_path,
    )  # fmt: skip
    listed = run(sys.executable, "-m", "terakoya", "plugins", "list", folder=tmp_path, path=site)
    return [line.split() for line in listed.splitlines()], site
