"""tools/docker/Dockerfile copies all that the package needs. The image itself is built by those who have Docker."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_image_copies_makes_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    lines = (ROOT / "tools/docker/Dockerfile").read_text().splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    assert copied, "else nothing below is tested"
    for *names, target in copied:
        for name in names:
            assert target == "./" or [target] == names
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next((tmp_path / "wheel").glob("*.whl"))) as wheel:
        names = wheel.namelist()
    for part in ("terakoya/commands/main.py", "terakoya_plugins/architectures/", "terakoya/presets/bert_base.json"):
        assert any(name.startswith(part) for name in names), part


def test_the_image_takes_the_torch_of_the_makefile() -> None:
    pinned = re.search(r"^TORCH \?= (torch==\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f'ARG TORCH="{pinned[1]} ' in (ROOT / "tools/docker/Dockerfile").read_text()


def test_the_image_installs_extras_that_exist_with_a_python_that_is_supported() -> None:
    dockerfile = (ROOT / "tools/docker/Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', dockerfile)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", dockerfile, re.M)
    assert SpecifierSet(project["requires-python"]).contains(python)
    assert re.search(r'^ENTRYPOINT \["(\w+)"\]$', dockerfile, re.M)[1] in project["scripts"]  # type: ignore[index]
