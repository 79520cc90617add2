"""A plugin's places: a zip file as a corpus, as a token store, and as where a run is kept and goes on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import toy
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.launch.here import train
from terakoya.places import is_local, place_of
from terakoya.plugins import load
from terakoya.runs.finding import find_checkpoint
from terakoya.store.token_store import TokenStore, open_store

pytestmark = pytest.mark.usefixtures("fresh_plugins")

ZIP = """
import contextlib, os, shutil, tempfile
from pathlib import Path
from terakoya import hookimpl
from terakoya.places import Keeper, Place
from terakoya.store.token_store import TokenStore

class Zip(Place):
    @property
    def file(self):
        return self.name.removeprefix("zip:/")

    def extracted(self):
        folder = Path(tempfile.mkdtemp())
        shutil.unpack_archive(self.file, folder)
        return folder

    def find_files(self):
        return sorted(self.extracted().iterdir())

    def open_store(self):
        return TokenStore.open(self.extracted())

    def viewing(self):
        return contextlib.nullcontext(self.extracted())

    checkpoint = extracted

    def has_run(self):
        return os.path.exists(self.file)

    def work_folder(self, given):
        return Path(given)

    @contextlib.contextmanager
    def keep_in_step(self, folder, context, *, keep, start_over):
        if os.path.exists(self.file):
            shutil.unpack_archive(self.file, folder)
        yield Keeper()
        shutil.make_archive(self.file.removesuffix(".zip"), "zip", folder)

@hookimpl
def register_places():
    return {"zip": Zip}
"""


@pytest.fixture
def plugin(fresh_plugins: None, tmp_path: Path) -> str:
    file = tmp_path / "zips.py"
    file.write_text(ZIP, encoding="utf-8")
    load([str(file)])
    return str(file)


def pack(folder: Path, file: Path) -> str:
    return f"zip:/{shutil.make_archive(str(file.with_suffix('')), 'zip', folder)}"


@pytest.mark.usefixtures("plugin")
def test_a_corpus_and_a_store_are_read_from_it(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("一\n\n二\n", encoding="utf-8")
    there, here = Corpus([pack(texts, tmp_path / "texts.zip")]), Corpus([texts])
    read = [[each.text for block in corpus.blocks() for each in corpus.read(block)] for corpus in (there, here)]
    assert read[0] == read[1] == ["一", "二"]
    (texts / "a.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.bin: expected a file name ending in"):
        Corpus([pack(texts, tmp_path / "others.zip")])
    store = toy.make_store(tmp_path / "data", documents=20, seed=1)
    assert open_store(Path(pack(store, tmp_path / "store.zip"))).fingerprint == TokenStore.open(store).fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_a_run_is_kept_in_it_and_goes_on_from_it(tmp_path: Path) -> None:
    settings = toy.parameters(toy.make_store(tmp_path / "data", documents=60, seed=1), max_steps=2)
    place = f"zip:/{tmp_path}/run.zip"
    train(settings, place, work_folder=tmp_path / "one")
    (status,) = json.loads(CliRunner().invoke(build_app(), ["status", place, "--json"]).stdout)
    assert (status["state"], status["step"]) == ("finished", 2)
    assert find_checkpoint(Path(place)).name == "step-00000002"
    train({**settings, "max_steps": 3}, place, work_folder=tmp_path / "two", allow_change=["max_steps"])
    assert [each["step"] for each in toy.records(tmp_path / "two", "resume").values()] == [2]


def test_what_a_place_has_not_is_refused(plugin: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zip://a/b: a run or a token store cannot be at zip://"):
        place_of("zip:/a/b").verify()
    other = tmp_path / "others.py"
    other.write_text(ZIP, encoding="utf-8")
    load([str(other)])
    with pytest.raises(UserError, match=r'places "zip" are registered twice: by zips and by others .*--without others'):
        place_of("zip://a")


def test_a_scheme_that_nobody_has_names_the_family() -> None:
    load(without=["places"])
    assert not is_local("s3://bucket/run") and is_local("bucket/run")
    with pytest.raises(UserError, match=r"s3://\*\*\*@bucket/run: no plugin has places at s3://; .*the family places"):
        place_of("s3://key:secret@bucket/run")
