"""The notebook of the documentation trains a model from the first cell to the last."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebooks" / "train_a_bert.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_holds_no_outputs() -> None:
    assert len(code_cells()) == 9
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_its_cells_go_from_text_to_a_model_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib

    matplotlib.use("Agg", force=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells()):
        source = "".join(cell["source"])
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source.replace("STEPS = 300", "STEPS = 6").replace("-1=16", "-1=2"), name, "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert "8 documents of our own" in printed[0] and "step 6, loss " in printed[2]
    assert sorted(names["losses"]) == list(range(1, 7)) and set(names["checks"]) >= {3, 6}
    assert len(printed) == 9 and printed[-1].count("'") == 10, printed
    assert (tmp_path / "work/model/model.safetensors").is_file()
