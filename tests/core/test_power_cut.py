"""Power cuts on a real file system: an ext4 image is copied at the moment when a command has ended, as if the machine
stopped there, and mounted again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_commands import ONE_RANK, World, make_world

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if os.getuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    with make_world(tmp_path_factory.mktemp("faults")) as made:
        yield made


class Disk:
    """An ext4 file system in a file, mounted at `folder`."""

    def __init__(self, place: Path) -> None:
        self.image, self.folder = place / "image", place / "disk"
        self.folder.mkdir()
        with self.image.open("wb") as file:
            file.truncate(200 << 20)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)
        self.mount()

    def mount(self) -> None:
        if subprocess.run(["mount", "-o", "loop", self.image, self.folder], check=False).returncode:
            pytest.skip("root may not mount an image here")

    def unmount(self) -> None:
        subprocess.run(["umount", self.folder], check=True)

    def cut_power(self) -> None:
        """Keeps what the disk has now, after names were committed as the journal does every few seconds."""
        with (self.folder / "other").open("wb") as file:
            os.fsync(file.fileno())
        kept = self.image.with_name("kept")
        subprocess.run(["cp", "--sparse=always", self.image, kept], check=True)
        self.unmount()
        kept.replace(self.image)
        self.mount()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.unmount()


def test_what_was_not_flushed_is_lost(disk: Disk) -> None:
    """The test itself: this disk forgets."""
    (disk.folder / "draft").write_text("important")
    (disk.folder / "draft").rename(disk.folder / "final")
    disk.cut_power()
    assert (disk.folder / "final").read_text() == ""


@pytest.mark.parametrize("name", ONE_RANK)
def test_everything_that_a_command_made_outlasts_a_power_cut(name: str, disk: Disk, world: World) -> None:
    case = disk.folder / "case"
    assert world.run(name, case).codes == [0]
    disk.cut_power()
    assert world.content(name, case) == world.content(name, world.straight(name))
    if name in ("run", "train bert"):  # nothing is left to do, and nothing stands in the way
        assert world.run(name, case).codes == [0]
