"""Further toy stores that tests of training, planning and commands use."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy


@pytest.fixture(scope="session")
def line_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 60 documents cut into lines."""
    return toy.make_store(tmp_path_factory.mktemp("toy") / "lines", documents=60, seed=3, unit="line")


@pytest.fixture
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which nothing can be written: a read-only file system for root, whom modes do not stop."""
    folder = tmp_path_factory.mktemp("read_only")
    if os.getuid():
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
    elif subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("root may not mount a file system here")
    else:
        yield folder
        subprocess.run(["umount", folder], check=True)
