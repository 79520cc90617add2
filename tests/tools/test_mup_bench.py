"""`tools/bench/mup.py` finds the best learning rates of a narrow and of a wide model."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from tool_modules import load_tool


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_tool("bench/mup")


def test_the_search_ends_between_two_worse_neighbours(bench: Any) -> None:
    tried: list[int] = []

    def loss(rate: int) -> float:
        tried.append(rate)
        return (rate + 6.2) ** 2

    losses = bench.search(loss, -9, 9)
    assert min(losses, key=losses.__getitem__) == -6
    assert tried == [-9, -10, -8, -7, -6, -5] and sorted(losses) == sorted(tried)
    assert len(bench.search(loss, -9, 3)) == 3


def test_the_base_width_is_the_wide_one(bench: Any) -> None:
    options = bench._options(["--store", "S", "--work", "W"])
    wide, narrow = (bench.settings("electra", width, 1e-3, mup, options) for width, mup in ((512, False), (128, True)))
    assert wide["mup"] is None and narrow["mup"] == {"base_width": 512}
    sizes = ("hidden_size", "embedding_size", "num_attention_heads", "intermediate_size")
    assert [wide["architecture"][each] for each in sizes] == [4 * narrow["architecture"][each] for each in sizes]


@pytest.mark.slow
def test_it_compares_two_widths(
    bench: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "terakoya")  # the tool sets it, too; the test sets it back
    assert bench.main(["--tiny", "--architectures", "bert"]) == 0
    printed = capsys.readouterr().out
    for kind in ("32", "16, with mup", "16, without mup"):
        assert re.search(rf"^bert, width {kind}: best \S+; \S+: \d\.\d{{3}}, \S+: \d\.\d{{3}}$", printed, re.M)
    assert re.search(r"^bert: between widths 16 and 32 .* factor of \d+ with mup and \d+ without mup$", printed, re.M)
