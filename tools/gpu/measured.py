"""Writes what was measured on GPUs into docs/explanation/measured.md and .ja.md, and the rates that `terakoya estimate`
and `init` take into plugins/terakoya_planning/cards.csv: python tools/gpu/measured.py

Each folder tools/gpu/results/CARD-DATE/ holds the `hour.jsonl` that tools/gpu/hour.py wrote on that card. The section
between the markers of both pages is made from them alone; a test compares it with what this program writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "gpu" / "results"
FILE = "hour.jsonl"
CARDS = ROOT / "plugins" / "terakoya_planning" / "cards.csv"
CARD_COLUMNS = (
    "card", "preset", "rows", "length", "precision", "deterministic", "cuda_graphs", "tokens_per_second",
    "flops_per_token", "source",
)  # fmt: skip
EARLIER = {
    "micro-steps 1": ("true", "false"), "not deterministic": ("false", "false"), "CUDA graphs": ("true", "true"),
    "CUDA graphs, not deterministic": ("false", "true"),
}  # fmt: skip
"""Variants of November 2026 -> whether they are deterministic, and have CUDA graphs, which were no default then."""
BEGIN, END = "<!-- gpu: begin; tools/gpu/measured.py writes this section -->", "<!-- gpu: end -->"

WHERE = ("device", "python", "torch", "transformers", "commit", "documents")
"""What a measurement says of where it was taken, and of the store."""
CASE = (
    "what", "command", "shape", "preset", "layers", "extrapolated", "optimizer", "kernel", "room", "precision",
    "attention", "rows", "micro_steps", "length", "variant", "compiled", "deterministic",
)  # fmt: skip
"""What a measurement says of itself; everything else is what was seen. The last one of equal ones counts."""
PEER = "Trainer, compiled, same rows"
"""The variant that goals are compared with."""
HIDDEN = {"part", "stage", "time", "said", *WHERE, *CASE}


@dataclass(frozen=True)
class Goal:
    """Tokens a second that a preset is to reach as it is shipped: on an H100, on an H200.

    Attributes:
        variant: what is measured for it, as the accumulation of some presets takes a minute a step.
        at: what of a measurement's case is meant beside the preset.
    """

    name: str
    preset: str
    h100: float | None
    h200: float | None
    variant: str = "as shipped"
    at: Mapping[str, Any] = field(default_factory=dict)

    def on(self, device: str) -> float | None:
        """Returns the goal for a `device`, by its name; None where there is none."""
        return self.h100 if "H100" in device else self.h200 if "H200" in device else None


GOALS = (
    Goal("BERT-base", "bert_base", 640_000, 700_000),
    Goal("BERT-large", "bert_large", 210_000, 225_000),
    Goal("ELECTRA-small", "electra_small", 1_500_000, 1_500_000),
    Goal("ELECTRA-base", "electra_base", 450_000, 450_000),
    Goal("ModernBERT-base", "modernbert_base", None, 500_000, "micro-steps 8"),
    Goal("GPT-2 124M", "gpt2_125m", 560_000, 600_000),
    Goal("Llama-1B", "llama_1b", None, 75_000, "micro-steps 8"),
    Goal("Llama-8B", "llama_8b", None, 10_500, "micro-steps 8", {"layers": 32}),
)
"""What a card is measured for."""

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "some": "On GPUs, by [tools/gpu](../../tools/gpu/README.md); a folder of `tools/gpu/results` each:",
        "head": "| part | stage | case | seen |",
        "failed": "failed",
        "goals": "| | tokens/s as shipped | goal | steps in which the GPU waited | tokens/s, best | as | beside "
        "`Trainer`, compiled, same rows | share of the card's own products |",
        "extrapolated": "extrapolated",
    },
    "ja": {
        "some": "GPU での値です。[tools/gpu](../../tools/gpu/README.md)(英語)で測りました。"
        "`tools/gpu/results` のフォルダごとに載せます。",
        "head": "| 部 | 段階 | 条件 | 結果 |",
        "failed": "失敗",
        "goals": "| | トークン毎秒(プリセットのまま) | 目標 | GPU が待ったステップ | トークン毎秒(最良) | 条件 | "
        "同じ行を学習するコンパイル済み `Trainer` との比 | このカードの行列積に対する割合 |",
        "extrapolated": "外挿",
    },
}  # fmt: skip


def pages() -> Mapping[str, Path]:
    """Returns the page of each language."""
    folder = ROOT / "docs" / "explanation"
    return {"en": folder / "measured.md", "ja": folder / "measured.ja.md"}


def section(results: Path, language: str) -> str:
    """Returns the section from the files under `results`, with its markers."""
    lines = [BEGIN, WORDS[language]["some"]]
    for file in sorted(results.glob(f"*/{FILE}")):
        lines += ["", *_table(file, language)]
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


def goals(file: Path, language: str) -> Iterator[str]:
    """Yields the lines of the table of GOALS, with what of `file` there is for them."""
    words, found = WORDS[language], measurements(file)
    yield words["goals"]
    yield "|---" * 8 + "|"
    for goal in GOALS:
        wanted = {"preset": goal.preset, **goal.at}
        rates = [each for each in found if "tokens_per_second" in each and wanted.items() <= each.items()]
        ratios = [each["ours_over_this"] for each in rates if each["variant"] == PEER and "ours_over_this" in each]
        ours = [each for each in rates if not each["variant"].startswith("Trainer")]
        shipped: Mapping[str, Any] = next((each for each in ours if each["variant"] == goal.variant), {})
        best: Mapping[str, Any] = max(ours, key=lambda each: each["tokens_per_second"], default={})
        case = [f"{best['rows']} x {best['length']}", best["variant"]] if best else []
        case += [words["extrapolated"]] * bool(best.get("extrapolated"))
        cells = (
            goal.name, _number(shipped.get("tokens_per_second")), _number(goal.on(_device(found))),
            _share(shipped.get("gpu_waits")), _number(best.get("tokens_per_second")), ", ".join(case),
            f"{ratios[-1]:.2f} x" if ratios else "", _share(best.get("product_share")),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _device(found: Iterable[Mapping[str, Any]]) -> str:
    """Returns the device of the first of the measurements."""
    return str(next((each["device"] for each in found if "device" in each), ""))


def _number(value: float | None) -> str:
    """Returns the number as it is written; empty for None."""
    return "" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    """Returns the share in percent; empty for None."""
    return "" if value is None else f"{value:.0%}"


def measurements(file: Path) -> list[Mapping[str, Any]]:
    """Returns the measurements of `file`, of those of an equal case the last one, without stages that were left out."""
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for measurement in map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ()):
        if "left_out" in measurement:
            continue
        found[tuple(str(measurement.get(key)) for key in ("part", "stage", *CASE))] = measurement
    return list(found.values())


def _table(file: Path, language: str) -> Iterator[str]:
    """Yields the lines of one card: the goals, then everything that was measured."""
    words, found = WORDS[language], measurements(file)
    machines = dict.fromkeys(", ".join(_machine(each)) for each in found if "device" in each)
    yield f"`{file.parent.name}`: {'; '.join(machines)}"
    yield ""
    yield from goals(file, language)
    yield ""
    yield words["head"]
    yield "|---|---|---|---|"
    for each in found:
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
    if key in ("compiled", "deterministic"):
        return key if value else f"not {key}"
    return str(value)


def _seen(measurement: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    """Yields what was measured: `tokens per second 512,000`."""
    if measurement.get("error"):
        yield f"**{words['failed']}**: {measurement['error']}"
    for key, value in measurement.items():
        if key in HIDDEN or key == "error":
            continue
        yield f"{key.replace('_', ' ')} {written(value)}"


def written(value: Any) -> str:
    """Returns what was measured as it is written: a number with four digits, or with all before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
    return str(value)


def card_table(results: Path) -> str:
    """Returns the rates of terakoya's presets under `results` as CSV; of those of an equal case the slowest."""
    slowest: dict[tuple[Any, ...], tuple[float, tuple[str, ...]]] = {}
    for file in sorted(results.glob(f"*/{FILE}")):
        for each in measurements(file):
            settings = _settings(each)
            if settings is None or "flops_per_token" not in each or each.get("extrapolated"):
                continue
            case = (each["device"], each["preset"], str(each["rows"]), str(each["length"]), "bf16", *settings)
            rate = each["tokens_per_second"]
            row = (*case, f"{rate:.0f}", f"{each['flops_per_token']:.0f}", file.parent.name)
            if case not in slowest or rate < slowest[case][0]:
                slowest[case] = rate, row
    lines = [CARD_COLUMNS, *(row for _, row in sorted(slowest.values(), key=lambda each: each[1]))]
    return "".join(",".join(line) + "\n" for line in lines)


def _settings(measurement: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns whether a `measurement` is of deterministic algorithms and of CUDA graphs; None where it does not say, or
    differs from the preset in more than these, its rows and its micro-steps."""
    variant = measurement.get("variant", "")
    changed = {part.rpartition(" ")[0] for part in variant.split(", ")} - {"as"}  # as shipped
    if "cuda_graphs" in measurement and changed <= {"rows", "micro-steps", "cuda_graphs", "deterministic"}:
        return json.dumps(measurement["deterministic"]), json.dumps(measurement["cuda_graphs"])
    return EARLIER.get(variant)


def main() -> None:
    """Writes the section of both pages, and the table of rates."""
    CARDS.write_text(card_table(RESULTS), encoding="utf-8")
    for language, page in pages().items():
        text = page.read_text(encoding="utf-8")
        page.write_text(replaced(text, section(RESULTS, language)), encoding="utf-8")


if __name__ == "__main__":
    main()
