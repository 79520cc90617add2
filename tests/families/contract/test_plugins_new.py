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


@pytest.mark.nightly
def test_the_tests_that_it_writes_pass(tmp_path: Path) -> None:
    write(list(SINGULAR), tmp_path)
    assert f"{2 * len(SINGULAR)} passed" in run(sys.executable, "-m", "pytest", "-q", "-W", "error", folder=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_every_kind_is_clean(tmp_path: Path) -> None:
    write(list(SINGULAR), tmp_path)
    config = str(ROOT / "pyproject.toml")
    run(sys.executable, "-m", "ruff", "check", "--config", config, ".", folder=tmp_path)
    run(sys.executable, "-m", "ruff", "format", "--check", "--config", config, ".", folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds it, is not installed"
)
def test_an_installed_package_needs_no_plugin_option(tmp_path: Path) -> None:
    kinds = list(SINGULAR)
    made = [new(f"my_{kind}", kind, tmp_path, package=True) for kind in kinds]
    modules = [f"terakoya_my_{kind}" for kind in kinds]
    assert [[file.relative_to(tmp_path).as_posix() for file in files] for files in made] == [
        [f"{name.replace('_', '-')}/{file}" for file in ("pyproject.toml", f"{name}.py", f"test_{name}.py")]
        for name in modules
    ]
    site = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
        "--target", str(site), *(str(files[0].parent) for files in made), folder=tmp_path,
    )  # fmt: skip
    lines = run(sys.executable, "-m", "terakoya", "plugins", "list", folder=tmp_path, path=site).splitlines()
    listed = [line.split() for line in lines]
    assert all(
        [kind, f"my_{kind}", name, name.replace("_", "-"), "0.1.0"] in listed
        for kind, name in zip(kinds, modules, strict=True)
    )
    assert not list(site.glob("test_*"))
