"""Which size learns most in a given time, at toy size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from toy import make_store

from terakoya_planning.speed import Speed

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


def test_each_size_gets_the_run_that_init_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], forks: None
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import sizes

    monkeypatch.setattr(sizes, "measure_here", lambda *_: Speed(10.0, 10.0, 0.3, "probe", "a toy"))
    store = str(make_store(tmp_path / "store", documents=60, seed=1))
    folders = ["--store", store, "--validation", store, "--work", str(tmp_path / "work")]
    command = [*folders, "--presets", "tiny_modernbert", "--minutes", "1", "2"]
    assert sizes.main(command) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, steps in zip(lines, (6, 12), strict=True):
        found = re.fullmatch(
            r"\| tiny_modernbert \| 0\.\d \| 0\.\d \| (\d+) \| \d\.\d{3} \| \d+\.\d% \| \d+\.\d{3} \|", line
        )
        assert found and int(found[1]) == steps, line
    raw = json.loads((tmp_path / "work/tiny_modernbert-2.json").read_text(encoding="utf-8"))
    assert raw["optimizer"]["type"] == "muon"
    monkeypatch.setattr(sizes.subprocess, "Popen", None)  # what is trained is not trained again
    assert sizes.main(command) == 0 and capsys.readouterr().out.splitlines()[-2:] == lines
