"""Renders a tokenizer report as one HTML page with tables and inline SVG charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from terakoya_report.tokenizer_report import MAX_WORD_TOKENS, TokenizerReport

COLOURS = ("#4363d8", "#e07b00", "#2e8b57", "#b8336a", "#7a5195", "#5f6b6d")
MOST_FREQUENT = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)
EXAMPLES = 60
CHARACTER_WIDTH, LINE_HEIGHT = 7.2, 12
"""Approximate size of the figures in charts, in the units of the charts."""

STYLE = """
body { font: 15px/1.6 system-ui, "Hiragino Sans", "Noto Sans JP", sans-serif; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; color: #1c2022; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse } th, td { padding: .25rem .9rem .25rem 0; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #9aa3a6 }
tbody td { border-bottom: 1px solid #e3e6e7 } svg text { font: 12px system-ui, sans-serif; fill: #1c2022 }
code { background: #f0f2f3; padding: 0 .25rem; border-radius: .2rem; white-space: pre-wrap }
.legend span { margin-right: 1.2rem } .dot { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .4rem; vertical-align: -1px }
.pieces { columns: 16rem; padding-left: 1.2rem } .pieces li { break-inside: avoid }
"""


def summary_figures(report: TokenizerReport) -> Mapping[str, str]:
    """Returns the figures of one tokenizer by name, formatted for a table."""

    def share(value: float | None) -> str:
        return "not known" if value is None else f"{100 * value:.2f} %"

    unused = len(report.unused_pieces())
    per_word = report.tokens_per_word
    return {
        "kind": report.kind,
        "vocabulary": f"{report.vocabulary:,}",
        "special tokens and unused slots": f"{report.special:,}",
        "documents": f"{report.documents:,}",
        "characters": f"{report.characters:,}",
        "tokens": f"{report.tokens:,}",
        "characters per token": f"{report.characters_per_token:.3f}",
        "unknown tokens": f"{report.unknown:,} ({share(report.unknown_rate)})",
        "tokens per word": "not known" if per_word is None else f"{per_word:.3f}",
        "words split": share(report.split_rate),
        "pieces never used": f"{unused:,} ({share(unused / max(1, len(report.ordinary)))})",
    }


def render_page(reports: Sequence[TokenizerReport], *, corpus: str) -> str:
    """Returns the page for `reports` on one text; `corpus` names the text."""
    names = [report.name for report in reports]
    figures = [summary_figures(report) for report in reports]
    parts = [
        f"<h1>Tokenizer report</h1><p>Text: <code>{escape(corpus)}</code></p>{_legend(names)}",
        _table(["", *names], [[name, *(column[name] for column in figures)] for name in figures[0]]),
        "<h2>Tokens per word</h2>",
        _tokens_per_word(reports),
        "<h2>Known characters</h2><p>Each is encoded on its own. In % of all characters, and of distinct ones.</p>",
        _known_characters(reports),
        "<h2>Most frequent pieces</h2><p>Their share of all tokens.</p>",
        _bars(
            [f"{k:,}" for k in MOST_FREQUENT],
            [[100 * share for share in report.share_of_most_frequent(MOST_FREQUENT)] for report in reports],
            lambda value: f"{value:.0f} %",
        ),
        "<h2>Length of pieces</h2><p>Number of pieces in the vocabulary by number of characters.</p>",
        _bars(
            [*map(str, range(1, 10)), "10 +"],
            [[float(n) for n in report.piece_lengths()] for report in reports],
            lambda value: f"{value:,.0f}",
        ),
    ]
    for report in reports:
        longest = [f"<code>{escape(piece)}</code> {count:,}" for piece, count in report.longest(EXAMPLES // 2)]
        unused = report.unused_pieces()
        step = max(1, len(unused) // EXAMPLES)
        examples = [f"<code>{escape(piece)}</code>" for piece in unused[::step][:EXAMPLES]]
        parts += [
            f"<h2>{escape(report.name)}: longest pieces used</h2>{_list(longest)}",
            f"<h2>{escape(report.name)}: {len(unused):,} pieces never used</h2>",
            _list(examples) if examples else "<p>None.</p>",
        ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Tokenizer report</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _tokens_per_word(reports: Sequence[TokenizerReport]) -> str:
    series, colours, left_out = [], [], []
    for report, colour in zip(reports, _colours(len(reports)), strict=True):
        if report.words is None or not sum(report.words):
            left_out.append(report.name)
            continue
        series.append([100 * count / sum(report.words) for count in report.words])
        colours.append(colour)
    if not series:
        return "<p>None of these tokenizers knows words.</p>"
    note = f" Words are not known and left out: {escape(', '.join(left_out))}." if left_out else ""
    labels = [*map(str, range(1, MAX_WORD_TOKENS)), f"{MAX_WORD_TOKENS} +"]
    bars = _bars(labels, series, lambda value: f"{value:.1f} %", colours)
    return f"<p>Share of all words by number of tokens.{note}</p>{bars}"


def _known_characters(reports: Sequence[TokenizerReport]) -> str:
    classes = [name for name in reports[0].coverage if all(name in report.coverage for report in reports)]
    shares = [[100 * report.coverage[name].known / report.coverage[name].characters for name in classes]
              for report in reports]  # fmt: skip
    rows = []
    for name in classes:
        coverages = [report.coverage[name] for report in reports]
        cells = [f"{coverage.distinct_known:,} of {coverage.distinct:,}" for coverage in coverages]
        rows.append([name, f"{coverages[0].characters:,}", *cells])
    table = _table(["", "characters", *(f"distinct known, {report.name}" for report in reports)], rows)
    return _bars(classes, shares, lambda value: f"{value:.2f}") + table


def _bars(
    labels: Sequence[str],
    series: Sequence[Sequence[float]],
    show: Callable[[float], str],
    colours: Sequence[str] | None = None,
) -> str:
    """Returns a bar chart with a group of bars for each label, one bar for each series. The figure above a bar is
    rotated if the bar is narrow, and left out if the bar is narrower than a line of text."""
    width, tallest, bottom = 900, 212, 24
    colours = colours or _colours(len(series))
    largest = max([value for values in series for value in values], default=0.0) or 1.0
    group = width / max(1, len(labels))
    bar = min(60.0, 0.8 * group / len(series))
    text_width = CHARACTER_WIDTH * max([len(show(value)) for values in series for value in values], default=0)
    horizontal = bar >= text_width
    height = tallest + (18 if horizontal else 10 + text_width)
    shapes = []
    for position, label in enumerate(labels):
        left = position * group + (group - bar * len(series)) / 2
        for number, values in enumerate(series):
            bar_height = tallest * values[position] / largest
            x, y = left + number * bar, height - bar_height
            figure = escape(show(values[position]))
            shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" height="{bar_height:.1f}" '
                f'fill="{colours[number]}"><title>{figure}</title></rect>'
            )
            middle = x + bar / 2 - 1
            if horizontal:
                shapes.append(f'<text x="{middle:.1f}" y="{y - 4:.1f}" text-anchor="middle">{figure}</text>')
            elif bar >= LINE_HEIGHT:
                shapes.append(f'<text transform="translate({middle + 4:.1f} {y - 4:.1f}) rotate(-90)">{figure}</text>')
        centre = (position + 0.5) * group
        shapes.append(f'<text x="{centre:.1f}" y="{height + 17:.1f}" text-anchor="middle">{escape(label)}</text>')
    shapes.append(f'<line x1="0" x2="{width}" y1="{height:.1f}" y2="{height:.1f}" stroke="#9aa3a6"/>')
    return f'<svg viewBox="0 0 {width} {height + bottom:.1f}" role="img" width="100%">{"".join(shapes)}</svg>'


def _colours(number: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(number)]


def _legend(names: Sequence[str]) -> str:
    dots = (
        f'<span><span class="dot" style="background:{colour}"></span>{escape(name)}</span>'
        for name, colour in zip(names, _colours(len(names)), strict=True)
    )
    return f'<p class="legend">{"".join(dots)}</p>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _list(items: Iterable[str]) -> str:
    return '<ul class="pieces">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
