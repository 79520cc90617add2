"""Environments of their own for tools: another version of a library, or programs that terakoya does not need."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_environment(folder: Path, packages: Sequence[str], *, with_terakoya: bool = False) -> Path:
    """Returns the Python of the environment `folder`, in which pip installs `packages` and `terakoya_tokenizer` first.

    It borrows what it does not have itself, torch above all, from the environment that runs this; pip knows of it.

    Args:
        with_terakoya: whether terakoya of this repository can be imported in it.
    """
    python, finished = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join([*packages, f"terakoya: {with_terakoya}"])
    if finished.exists() and finished.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, with_pip=True)
    site = next(folder.glob("lib/python*/site-packages"))
    borrowed = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    own = [str(ROOT / "core"), str(ROOT / "plugins")] if with_terakoya else []
    (site / "borrowed.pth").write_text("\n".join(dict.fromkeys([*own, *borrowed])) + "\n", encoding="utf-8")
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-warn-conflicts",
    ]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", ROOT / "core" / "terakoya_tokenizer"], check=True)
    finished.write_text(wanted, encoding="utf-8")
    return python
