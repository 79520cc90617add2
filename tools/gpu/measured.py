"""Writes what was measured on GPUs into docs/explanation/measured.md and .ja.md: python tools/gpu/measured.py

Each folder tools/gpu/results/CARD-DATE/ holds the `hour.jsonl` that tools/gpu/hour.py wrote on that card. The section
between the markers of both pages is made from them alone; a test compares it with what this program writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "gpu" / "results"
FILE = "hour.jsonl"
BEGIN, END = "<!-- gpu: begin; tools/gpu/measured.py writes this section -->", "<!-- gpu: end -->"

WHERE = ("device", "python", "torch", "transformers", "commit")
"""What a measurement says of the machine."""
CASE = (
    "what", "command", "shape", "preset", "optimizer", "kernel", "room", "precision", "attention", "rows", "variant",
    "compiled",
)  # fmt: skip
"""What a measurement says of itself; everything else is what was seen. The last one of equal ones counts."""
HIDDEN = {"part", "stage", "time", "said", *WHERE, *CASE}

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "none": "**Nothing has been measured on a GPU yet.** [Three commands](../../tools/gpu/README.md) measure a "
        "card: whether a\nrun is right there, tokens/s and memory beside Transformers' `Trainer`, and what `terakoya "
        "estimate` says of it. So far they\nhave run on a CPU at toy size only, like `tools/bench/gpu.py`: flash "
        "attention, nccl and the promise that a step never waits\nfor the device have not been seen on a GPU.",
        "some": "On GPUs, by [tools/gpu](../../tools/gpu/README.md); a folder of `tools/gpu/results` each:",
        "head": "| part | stage | case | seen |",
        "failed": "failed",
    },
    "ja": {
        "none": "**GPU での測定はまだありません。** "
        "[三つのコマンド](../../tools/gpu/README.md)(英語)が、計算が正しいか、トークン毎秒とメモリ\n"
        "(Transformers の `Trainer` との比較)、`terakoya estimate` の見積もりとの差を測ります。"
        "これまでは `tools/bench/gpu.py` と同じく、\n小さな設定で CPU で動かしただけです。"
        "flash attention、nccl、ステップがデバイスを待たないことは、GPU ではまだ確かめていません。",
        "some": "GPU での値です。[tools/gpu](../../tools/gpu/README.md)(英語)で測りました。"
        "`tools/gpu/results` のフォルダごとに載せます。",
        "head": "| 部 | 段階 | 条件 | 結果 |",
        "failed": "失敗",
    },
}  # fmt: skip


def pages() -> Mapping[str, Path]:
    """Returns the page of each language."""
    folder = ROOT / "docs" / "explanation"
    return {"en": folder / "measured.md", "ja": folder / "measured.ja.md"}


def result_files(results: Path) -> list[Path]:
    """Returns the files of measurements under `results`, by name of their folder."""
    return sorted(results.glob(f"*/{FILE}"))


def section(results: Path, language: str) -> str:
    """Returns the section from the files under `results`, with its markers; where there are none, it says so."""
    words, files = WORDS[language], result_files(results)
    lines = [BEGIN, words["some"] if files else words["none"]]
    for file in files:
        lines += ["", *_table(file, words)]
    return "\n".join([*lines, END])


def replaced(page: str, written: str) -> str:
    """Returns the text `page` with the section `written` in the place of its own.

    Raises:
        ValueError: the page does not have the markers once each.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"expected {BEGIN} and {END} once each")
    before, _, rest = page.partition(BEGIN)
    return before + written + rest.partition(END)[2]


def _table(file: Path, words: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of one card's table."""
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        measurement = json.loads(line)
        found[tuple(str(measurement.get(key)) for key in ("part", "stage", *CASE))] = measurement
    machines = dict.fromkeys(", ".join(_machine(each)) for each in found.values())
    yield f"`{file.parent.name}`: {'; '.join(machines)}"
    yield ""
    yield words["head"]
    yield "|---|---|---|---|"
    for each in found.values():
        case = ", ".join(_value(key, each[key]) for key in CASE if each.get(key) is not None)
        cells = (each["part"], each["stage"], case, "; ".join(_seen(each, words)))
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _machine(measurement: Mapping[str, Any]) -> Iterator[str]:
    """Yields the device and the versions, such as `torch 2.13.0`."""
    for key in WHERE:
        if measurement.get(key):
            yield measurement[key] if key == "device" else f"{key} {measurement[key]}"


def _value(key: str, value: Any) -> str:
    """Returns a value of a case in words: `32 rows`, `compiled`."""
    if key in ("rows", "room"):
        return f"{key} {value:,}"
    return ("compiled" if value else "not compiled") if key == "compiled" else str(value)


def _seen(measurement: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    """Yields what was measured: `tokens per second 512,000`."""
    if measurement.get("error"):
        yield f"**{words['failed']}**: {measurement['error']}"
    for key, value in measurement.items():
        if key in HIDDEN or key == "error":
            continue
        shown = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else value
        shown = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else shown
        yield f"{key.replace('_', ' ')} {shown}"


def main() -> None:
    """Writes the section of both pages."""
    for language, page in pages().items():
        text = page.read_text(encoding="utf-8")
        page.write_text(replaced(text, section(RESULTS, language)), encoding="utf-8")


if __name__ == "__main__":
    main()
