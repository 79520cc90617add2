"""The pages of measurements say what was measured on GPUs."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    yield importlib.import_module("measured")


def test_the_pages_are_what_their_tool_writes(tools: ModuleType) -> None:
    for language, page in tools.pages().items():
        text = page.read_text(encoding="utf-8")
        written = tools.replaced(text, tools.section(tools.RESULTS, language))
        assert text == written, f"{page.name} is not up to date; write it again: python tools/gpu/measured.py"


def test_the_rates_of_cards_are_those_of_the_results(tools: ModuleType) -> None:
    written = tools.card_table(tools.RESULTS)
    assert tools.CARDS.read_text(encoding="utf-8") == written, "write it again: python tools/gpu/measured.py"


def test_of_equal_measurements_the_slowest_is_a_cards_rate(tools: ModuleType, tmp_path: Path) -> None:
    case = {"part": "B", "device": "NVIDIA Toy", "preset": "tiny_bert", "rows": 4, "length": 8, "flops_per_token": 10.0}
    case |= {"deterministic": True, "cuda_graphs": False}
    lines = [
        {**case, "stage": "a", "variant": "as shipped", "tokens_per_second": 300.0},
        {**case, "stage": "b", "variant": "micro-steps 1, cuda_graphs false", "tokens_per_second": 200.0},
        {**case, "stage": "b", "variant": "cuda_graphs false, attention sdpa", "tokens_per_second": 150.0},
        {**case, "stage": "a", "variant": "Trainer, compiled, same rows", "tokens_per_second": 100.0},
        {**case, "stage": "a", "variant": "as shipped", "cuda_graphs": True, "rows": 8, "tokens_per_second": 500.0},
        {**case, "stage": "a", "variant": "CUDA graphs", "tokens_per_second": 400.0},
    ]
    (tmp_path / "Toy").mkdir()
    (tmp_path / "Toy" / tools.FILE).write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert tools.card_table(tmp_path).splitlines()[1:] == [
        "NVIDIA Toy,tiny_bert,4,8,bf16,true,false,200,10,Toy",
        "NVIDIA Toy,tiny_bert,4,8,bf16,true,true,400,10,Toy",
        "NVIDIA Toy,tiny_bert,8,8,bf16,true,true,500,10,Toy",
    ]


def test_measurements_become_a_table(tools: ModuleType, tmp_path: Path) -> None:
    assert all("|---" not in tools.section(tmp_path, language) for language in tools.WORDS)
    where = {"time": 1, "device": "NVIDIA Toy", "torch": "2.13.0"}
    rate = {
        "part": "B",
        "stage": "bert_base",
        "preset": "bert_base",
        "rows": 4,
        "length": 512,
        "variant": "as shipped",
        **where,
    }
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
        assert (
            lines[1] == words["some"]
            and words["goals"] in lines
            and lines[3] == "`toy-2026-01-01`: NVIDIA Toy, torch 2.13.0"
        )
        assert [line for line in lines[:-1] if line.startswith(("| A |", "| B |"))] == [
            "| B | bert_base | bert_base, rows 4, 512, as shipped | tokens per second 512,346; gigabytes 0.5 |",
            f"| A | waits | muon | **{words['failed']}**: a \\| b; waits True |",
        ]


def rate(preset: str, variant: str, tokens_per_second: float, **further: object) -> dict[str, object]:
    named = {"part": "B", "stage": preset, "preset": preset, "rows": 32, "length": 512, "variant": variant}
    return {**named, "device": "NVIDIA H100 80GB HBM3", "tokens_per_second": tokens_per_second, **further}


def test_the_goals_stand_beside_the_preset_as_it_is_and_the_best_rate(tools: ModuleType, tmp_path: Path) -> None:
    peer = "Trainer, compiled, same rows"
    whole = {"layers": 32, "length": 4096}
    measurements = [
        rate("bert_base", "as shipped", 600_000.0, product_share=0.5, gpu_waits=0.25),
        rate("bert_base", peer, 250_000.0, product_share=0.2, ours_over_this=2.4),
        rate("bert_base", "rows 96", 660_000.0, product_share=0.55, rows=96),
        rate("bert_base", "Trainer, compiled, same documents padded", 900_000.0, ours_over_this=0.7),
        rate("llama_8b", "micro-steps 8", 40_000.0, layers=4),
        rate("llama_8b", "micro-steps 8", 9_000.0, extrapolated=True, product_share=0.6, **whole),
        {"part": "A", "stage": "memory", "preset": "bert_base", "rows": 32, "held_gigabytes": 9.0},
        {"part": "B", "stage": "bert_large", "left_out": "3 s left"},
    ]
    file = tmp_path / tools.FILE
    file.write_text("".join(json.dumps(each) + "\n" for each in measurements))
    found = {line.split(" | ")[0]: line for line in tools.goals(file, "en")}
    assert (
        found["| BERT-base"] == "| BERT-base | 600,000 | 640,000 | 25% | 660,000 | 96 x 512, rows 96 | 2.40 x | 55% |"
    )
    assert found["| BERT-large"] == "| BERT-large |  | 210,000 |  |  |  |  |  |"
    assert found["| Llama-8B"] == (
        "| Llama-8B | 9,000 |  |  | 9,000 | 32 x 4096, micro-steps 8, extrapolated |  | 60% |"
    )
    file.write_text(file.read_text().replace("H100 80GB HBM3", "H200"))
    assert [goal.on("NVIDIA H200") for goal in tools.GOALS] == [
        700_000, 225_000, 1_500_000, 450_000, 500_000, 600_000, 75_000, 10_500
    ]  # fmt: skip
    assert "| Llama-8B | 9,000 | 10,500 |" in "\n".join(tools.goals(file, "en"))


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
