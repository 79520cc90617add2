"""Renders the report of a corpus as one HTML page without scripts and external resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

from terakoya.log import translated

SHOWN_FILES = 40
COLOURS = 6
_WIDTH, _HEIGHT, _FOOT = 720, 220, 28

Example = Mapping[str, Any]


def say(text: str) -> str:
    """Returns a text of the program in the user's language, as HTML."""
    return escape(translated(text))


def render_page(report: Mapping[str, Any], *, language: str = "en") -> str:
    """Returns the page for what `report_corpus` returned. Its labels are in the user's language, whose code is
    `language`."""
    names = report["sources"]
    title = f"{translated('What is in the corpus')}: {names[0]}" + (f" + {len(names) - 1}" if len(names) > 1 else "")
    css = (files(__package__) / "page.css").read_text(encoding="utf-8")
    sections = [
        _unread(report),
        _tiles(report),
        _scripts(report),
        _lengths(report["lengths"]),
        _cleaning(report),
        _duplicates(report["duplicates"]),
        _lines(report["lines"]),
        _personal_data(report),
        _damage(report),
        _files(report["files"]),
        _rejects(report),
        _method(report),
    ]
    created = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        f'<!doctype html>\n<html lang="{escape(language)}"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{css}</style></head>\n<body><header><h1>{escape(title)}</h1>"
        f'<p class="quiet">{say("created")} {escape(created)}</p></header>\n<main>\n'
        + "\n".join(each for each in sections if each)
        + "\n</main></body></html>\n"
    )


# --------------------------------------------------------------------------------------------------------- sections


def _unread(report: Mapping[str, Any]) -> str:
    problems = [f"<li>{say(each['problem'])}</li>" for each in report["files"] if each["problem"]]
    if not problems:
        return ""
    return f'<section class="bad"><h2>{say("Not read to the end")}</h2><ul>{"".join(problems)}</ul></section>'


def _tiles(report: Mapping[str, Any]) -> str:
    quantiles = report["lengths"]["quantiles"]
    tiles = [
        (f"{report['documents']:,}", "documents"),
        (_short(report["characters"]), "characters"),
        (f"{len(report['files']):,}", "files"),
        (f"{report['disk_bytes'] / 1e6:,.1f} MB", "on disk"),
        (f"{quantiles['0.5']:,}", "characters in the median document"),
        (_share(report["duplicates"]["share"]), "exact duplicates"),
    ]
    if (cleaning := report["cleaning"]) is not None:
        tiles.append((_share(cleaning["kept_share"]), "kept by the cleaning steps"))
    if report["rejected"]:
        tiles.append((f"{sum(report['rejected'].values()):,}", "lines that are no document"))
    items = "".join(f"<li><b>{escape(value)}</b>{say(name)}</li>" for value, name in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _scripts(report: Mapping[str, Any]) -> str:
    text = say(
        "The script of most letters of a document, where a kana, kanji or hangul counts as three; kanji with kana are "
        "Japanese."
    )
    parts = [_heading("Scripts"), f"<p>{text}</p>", _ribbon(report["scripts"], report["documents"])]
    if report["languages"]:
        parts += [f"<h3>{say('Languages of the sample')}</h3>"]
        parts += [_ribbon(report["languages"], report["sample"]["documents"])]
    return _section(parts)


def _ribbon(counts: Mapping[str, int], total: int) -> str:
    """Returns a ribbon of shares, with a key: the most frequent by colour, all others in one."""
    ordered = sorted(counts.items(), key=lambda each: -each[1])
    shown = ordered[: COLOURS - 1]
    if rest := sum(count for _, count in ordered[COLOURS - 1 :]):
        shown.append((translated("others"), rest))
    bars, keys = "", ""
    for number, (name, count) in enumerate(shown):
        share = count / max(1, total)
        bars += f'<span class="k{number}" style="width:{100 * share:.2f}%"></span>'
        keys += f'<li><span class="dot k{number}"></span>{say(name)} <b>{_share(share)}</b> ({count:,})</li>'
    return f'<div class="ribbon" aria-hidden="true">{bars}</div><ul class="keys">{keys}</ul>'


def _lengths(lengths: Mapping[str, Any]) -> str:
    counts, starts = lengths["documents"], lengths["from"]
    used = [number for number, count in enumerate(counts) if count]
    if not used:
        return ""
    first, last = used[0], used[-1]
    most, width = max(counts), _WIDTH / (last - first + 1)
    bars = ""
    for number in range(first, last + 1):
        height = (_HEIGHT - _FOOT - 20) * counts[number] / most
        x, y = (number - first) * width, _HEIGHT - _FOOT - height
        label = f"{starts[number]:,}" if starts[number] < 10_000 else _short(starts[number])
        bars += f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{height:.1f}" rx="3"/>'
        bars += f'<text x="{x + 2:.1f}" y="{_HEIGHT - 8}">{label}</text>'
        if counts[number]:
            bars += (
                f'<text x="{x + width / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{_short(counts[number])}</text>'
            )
    quantiles = lengths["quantiles"]
    spoken = ", ".join(f"{float(share):.0%} ≤ {value:,}" for share, value in quantiles.items())
    foot = _HEIGHT - _FOOT
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(spoken)}">'
        f'<line x1="0" x2="{_WIDTH}" y1="{foot}" y2="{foot}"/>{bars}</svg>'
    )
    caption = say("Documents by their number of characters, each bar from the number below it on.")
    longest = lengths["longest"]
    table = _table(
        [f"{float(share):.0%}" for share in quantiles],
        [[_number(f"{value:,}") for value in quantiles.values()]],
        caption="So many of the documents have at most so many characters",
        numbers=range(len(quantiles)),
    )
    at = f"{longest['file']}:{longest['line']}"
    note = say(f"The longest document has {longest['characters']:,} characters: {at}")
    return _section(
        [_heading("Lengths"), f"<figure>{svg}<figcaption>{caption}</figcaption></figure>", table, f"<p>{note}</p>"]
    )


def _cleaning(report: Mapping[str, Any]) -> str:
    cleaning = report["cleaning"]
    if cleaning is None:
        text = say("Give --clean FILE to see what each cleaning step of a list would drop.")
        return _section([_heading("Cleaning"), f"<p>{text}</p>"])
    total = max(1, cleaning["documents"])
    parts = [_heading("Cleaning")]
    text = (
        f"Tried on {total:,} documents{_of_sample(report)}. Orange is what a step drops of all; open it for examples."
    )
    parts.append(f"<p>{say(text)}</p>")
    for step in cleaning["steps"]:
        note = " ≥" if step["compares"] and not report["sample"]["is_all"] else ""
        bar = _bar(step["share"], kind="drop")
        summary = (
            f'<span class="step"><span>{escape(step["name"])}</span>{bar}<b>{note} {_share(step["share"])}</b></span>'
        )
        shown = _examples(step["examples"]) or f'<p class="quiet">{say("It drops none of these.")}</p>'
        parts.append(f"<details><summary>{summary}</summary>{shown}</details>")
    if any(step["compares"] for step in cleaning["steps"]) and not report["sample"]["is_all"]:
        text = say("A step that compares documents finds more in all of the corpus than in a sample: hence ≥.")
        parts.append(f'<p class="quiet">{text}</p>')
    if cleaning["held_out"]:
        share = _share(cleaning["held_out"] / total)
        parts.append(f"<p>{say(f'Held out for validation: {share}')}</p>")
    parts.append(f"<h3>{say('Kept')}: {_share(cleaning['kept_share'])}</h3>{_examples(cleaning['kept_examples'])}")
    return _section(parts)


def _duplicates(duplicates: Mapping[str, Any]) -> str:
    documents, share = f"{duplicates['documents']:,}", _share(duplicates["share"])
    text = f"{documents} documents ({share}) are the same, to the letter, as an earlier one."
    parts = [_heading("Exact duplicates"), f"<p>{say(text)}</p>"]
    if not duplicates["is_exact"]:
        counted = f"{duplicates['counted']:,}"
        parts.append(f"<p>{say(f'Estimated from {counted} documents, chosen by a hash of their text.')}</p>")
    rows = []
    for group in duplicates["groups"]:
        of = group["duplicate_share"]
        rows.append(
            [
                f'<th scope="row">{escape(group["name"])}</th>',
                _number(f"{group['documents']:,}"),
                _number(_short(group["characters"])),
                _number(_share(of)),
                f'<td class="bar">{_bar(of)}</td>',
            ]
        )
    parts.append(
        _table(
            [
                translated("site or file"),
                translated("documents"),
                translated("characters"),
                translated("duplicates"),
                "",
            ],
            rows,
            caption="By the site of a document's url, or else by its file",
            numbers=(1, 2, 3),
        )
    )
    if duplicates["all_groups"] > len(rows):
        parts.append(f'<p class="quiet">{say("The largest are shown.")}</p>')
    if duplicates["texts"]:
        parts.append(f"<h3>{say('Documents that occur most often in the sample')}</h3>")
        parts.append(_times(duplicates["texts"]))
    return _section(parts)


def _lines(lines: Mapping[str, Any]) -> str:
    if not lines["repeated"]:
        return ""
    low, high = lines["characters"]
    text = f"Lines of {low} to {high} characters: menus, footers and signatures stand at the top."
    parts = [_heading("Repeated lines"), f"<p>{say(text)}</p>", _times(lines["repeated"])]
    if lines["error"]:
        text = f"There are more lines than are counted at a time: a number may be too low by {lines['error']:,}."
        parts.append(f'<p class="quiet">{say(text)}</p>')
    return _section(parts)


def _personal_data(report: Mapping[str, Any]) -> str:
    found = report["personal_data"]
    parts = [_heading("Personal data")]
    if found is None:
        text = "Not looked for: no plugin has the step personal_data. Mail addresses and long numbers are masked here."
        return _section([*parts, f"<p>{say(text)}</p>"])
    documents = f"{report['sample']['documents']:,}"
    parts.append(f"<p>{say(f'Found in {documents} documents{_of_sample(report)}; what it is, no page shows.')}</p>")
    rows = [
        [
            f'<th scope="row">{say(kind.replace("_", " "))}</th>',
            _number(f"{each['found']:,}"),
            _number(f"{each['documents']:,}"),
            _number(_share(each["share"])),
            f'<td class="bar">{_bar(each["share"])}</td>',
        ]
        for kind, each in found.items()
    ]
    head = [translated(name) for name in ("kind", "found", "documents", "share")]
    nothing = f"<p>{say('None was found.')}</p>"
    parts.append(
        _table([*head, ""], rows, caption="Documents with personal data", numbers=(1, 2, 3)) if rows else nothing
    )
    return _section(parts)


def _damage(report: Mapping[str, Any]) -> str:
    if not report["damage"]:
        return ""
    total = max(1, report["documents"])
    rows = [
        [
            f'<th scope="row">{say(name)}</th>',
            _number(f"{count:,}"),
            _number(_share(count / total)),
            f'<td class="bar">{_bar(count / total)}</td>',
        ]
        for name, count in sorted(report["damage"].items(), key=lambda each: -each[1])
    ]
    head = [translated(name) for name in ("in the text", "documents", "share")]
    return _section([_heading("Damaged text"), _table([*head, ""], rows, caption="Documents with it", numbers=(1, 2))])


def _files(found: Sequence[Mapping[str, Any]]) -> str:
    shown = sorted(found, key=lambda each: -each["disk_bytes"])[:SHOWN_FILES]
    rows = [
        [
            f'<th scope="row">{escape(each["name"])}</th>',
            f"<td>{escape(' '.join(filter(None, (each['format'], each['compression']))))}</td>",
            f"<td>{say(each['encoding'])}</td>",
            _number(f"{each['disk_bytes'] / 1e6:,.1f} MB"),
            _number(f"{each['documents']:,}"),
            _number(f"{each['rejected']:,}"),
        ]
        for each in shown
    ]
    head = [translated(name) for name in ("file", "format", "encoding", "on disk", "documents", "rejected")]
    parts = [_heading("Files"), _table(head, rows, caption="The largest first", numbers=(3, 4, 5))]
    if len(found) > len(shown):
        parts.append(f'<p class="quiet">{say(f"And {len(found) - len(shown):,} more files.")}</p>')
    return _section(parts)


def _rejects(report: Mapping[str, Any]) -> str:
    if not report["rejected"]:
        return ""
    total = sum(report["rejected"].values())
    text = say(f"Of the lines and rows {total:,} cannot be read as a document; some of each kind:")
    parts = [_heading("No documents"), f"<p>{text}</p>"]
    for reason, count in report["rejected"].items():
        examples = [{**each, "reason": ""} for each in report["rejects"] if each["reason"] == reason]
        parts.append(f"<details><summary>{say(reason)}: <b>{count:,}</b></summary>{_examples(examples)}</details>")
    return _section(parts)


def _method(report: Mapping[str, Any]) -> str:
    sample = report["sample"]
    size = f"{sample['documents']:,}"
    share = "100 %" if sample["is_all"] else _share(sample["share"])
    texts = [
        "Every file was read whole: documents, characters, scripts, lengths, sites, lines and rejects are counts of "
        "all. Of a document of more than 20,000 characters the script is that of its beginning; percentages of lengths "
        "are right to 1 in 32.",
        f"The sample has {size} documents, {share} of the distinct texts, chosen by a hash of each: the same each "
        "time.",
        "Mail addresses and numbers of six digits and more are masked in all that is quoted.",
    ]
    return _section([_heading("How this was measured"), *(f"<p>{say(each)}</p>" for each in texts)])


# ----------------------------------------------------------------------------------------------------------- pieces


def _of_sample(report: Mapping[str, Any]) -> str:
    return "" if report["sample"]["is_all"] else translated(", a sample")


def _section(parts: Iterable[str]) -> str:
    return f"<section>{''.join(parts)}</section>"


def _heading(text: str) -> str:
    return f"<h2>{say(text)}</h2>"


def _bar(share: float, *, kind: str = "") -> str:
    return (
        f'<span class="track" aria-hidden="true"><i class="{kind}" style="width:{100 * min(1, share):.2f}%"></i></span>'
    )


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _times(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [[_number(f"{each['times']:,}"), f"<td>{escape(each['text'])}</td>"] for each in found]
    return _table([translated("times"), translated("text")], rows, caption="The most frequent first", numbers=(0,))


def _examples(found: Sequence[Example]) -> str:
    items = ""
    for each in found:
        at = f"{each['file']}:{each['line']}" + (f" · {each['reason']}" if each["reason"] else "")
        items += f"<li>{escape(each['text'])}<small>{escape(at)}</small></li>"
    return f'<ul class="examples">{items}</ul>' if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numbers: Iterable[int] = ()) -> str:
    right = set(numbers)
    top = "".join(
        f'<th scope="col"{" class=number" if number in right else ""}>{escape(name)}</th>'
        for number, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><caption>{say(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _share(value: float) -> str:
    """Formats a share: 12.3 %, 0.04 %, 0 %."""
    return f"{100 * value:.1f} %" if value >= 0.001 else f"{100 * value:.2g} %"


def _short(value: float) -> str:
    """Formats a count: 812, 12.3k, 4.56M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if name == 'k' else unit):,.3g}{name}"
    return f"{value:,.0f}"
