"""The pages of measurements say what was measured on GPUs, or that nothing was; so does the top of the README."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEVER = {"README.md": "Never run on a GPU yet", "README.ja.md": "GPU ではまだ一度も動かしていません"}
TOP = 12
"""Lines of a README's top."""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    yield importlib.import_module("measured")


def test_the_pages_are_what_their_tool_writes(tools: ModuleType) -> None:
    for language, page in tools.pages().items():
        text = page.read_text(encoding="utf-8")
        written = tools.replaced(text, tools.section(tools.RESULTS, language))
        assert text == written, f"{page.name} is not up to date; write it again: python tools/gpu/measured.py"


def test_the_top_of_the_readme_says_whether_it_has_run_on_a_gpu(tools: ModuleType) -> None:
    nothing = not tools.result_files(tools.RESULTS)
    for name, words in NEVER.items():
        top = "\n".join((ROOT / name).read_text(encoding="utf-8").splitlines()[:TOP])
        assert (words in top) == nothing, name


def test_measurements_become_a_table(tools: ModuleType, tmp_path: Path) -> None:
    assert all("|---" not in tools.section(tmp_path, language) for language in tools.WORDS)
    where = {"time": 1, "device": "NVIDIA Toy", "torch": "2.13.0"}
    rate = {"part": "B", "stage": "bert_base", "preset": "bert_base", "rows": 4, "variant": "as shipped", **where}
    measurements = [
        {**rate, "tokens_per_second": 1000.0, "gigabytes": 0.5},
        {**rate, "tokens_per_second": 512_345.6, "gigabytes": 0.5},  # again: the last one counts
        {"part": "A", "stage": "waits", "optimizer": "muon", "waits": True, "error": "a | b", **where},
    ]
    (tmp_path / "toy-2026-01-01").mkdir()
    text = "".join(json.dumps(each) + "\n" for each in measurements)
    (tmp_path / "toy-2026-01-01" / tools.FILE).write_text(text)
    for language, words in tools.WORDS.items():
        lines = tools.section(tmp_path, language).splitlines()
        assert lines[1] == words["some"] and lines[3] == "`toy-2026-01-01`: NVIDIA Toy, torch 2.13.0"
        assert lines[7:-1] == [
            "| B | bert_base | bert_base, rows 4, as shipped | tokens per second 512,346; gigabytes 0.5 |",
            f"| A | waits | muon | **{words['failed']}**: a \\| b; waits True |",
        ]


def test_a_page_without_its_markers_is_refused(tools: ModuleType) -> None:
    begin, end = tools.BEGIN, tools.END
    for page in (
        "# Measured\n",
        f"{begin}\nthe rest of the page",
        f"{end}\n{begin}\n{end}",
        f"{begin}\n{begin}\n{end}",
    ):
        with pytest.raises(ValueError, match="gpu: begin"):
            tools.replaced(page, "")
