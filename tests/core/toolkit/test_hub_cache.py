"""Names on the Hub whose files are in the cache of this machine."""

from pathlib import Path

import pytest

from terakoya.config.start_from import model_folder
from terakoya.errors import UserError
from terakoya.toolkit.hub_cache import find_snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with one model, in the layout of `hf download`."""
    model = tmp_path / "models--someone--a-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(COMMIT)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_run_starts_from_downloaded_files(cache: Path) -> None:
    folder = cache / "models--someone--a-model/snapshots" / COMMIT
    assert find_snapshot("someone/a-model") == folder
    assert find_snapshot("someone/a-model", revision=COMMIT) == folder
    assert find_snapshot("someone/a-model", revision=COMMIT[::-1]) is None
    assert model_folder(Path("someone/a-model"), "start_from") == folder


@pytest.mark.parametrize("name", ["someone/another", "some/where/else", "..", "a//b"])
def test_nothing_is_downloaded_or_guessed(name: str, cache: Path) -> None:
    assert find_snapshot(name) is None
    if name != "..":
        with pytest.raises(UserError, match="start_from: "):
            model_folder(Path(name), "start_from")
