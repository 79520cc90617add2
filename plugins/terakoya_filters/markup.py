"""The step `markup`: remains of HTML and of wikis' markup are taken out, or the documents that have many dropped."""

from __future__ import annotations

import html
import re
from collections.abc import Set
from typing import Literal

from pydantic import Field

from terakoya.components import CleaningStep
from terakoya_filters.words import JAPANESE

_NAMES = (
    "a abbr article aside audio b blockquote body br button caption center cite code col dd del div dl dt em embed "
    "fieldset figcaption figure font footer form frame h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins "
    "label legend li link main map mark meta nav nobr noscript object ol option p param picture pre q rp rt ruby s "
    "samp script section select small source span strike strong style sub sup svg table tbody td textarea tfoot th "
    "thead title tr tt u ul var video wbr"
)
_TAG = re.compile(rf"<(/?)({'|'.join(_NAMES.split())})(\s[^<>]*|\s*/)?>", re.IGNORECASE)
_ALONE = frozenset(("br", "hr", "wbr"))
_BREAKS = frozenset(("blockquote", "br", "dd", "div", "dt", "hr", "li", "ol", "p", "pre", "table", "tr", "ul"))
_BREAKS |= {f"h{level}" for level in range(1, 7)}
_WHOLE = re.compile(
    r"<!--.{0,20000}?-->|<!doctype[^>]*>|<(script|style)\b[^>]*>[^。]{0,20000}?</\1\s*>", re.IGNORECASE | re.DOTALL
)
_ENTITY = re.compile(
    r"&(?:amp|lt|gt|quot|apos|nbsp|copy|reg|hellip|mdash|ndash|laquo|raquo|yen|#\d{1,6}|#x[\da-f]{1,5});", re.IGNORECASE
)
_BB = "(?:b|i|u|url|img|quote|size|color)"
_WIKI = re.compile(
    r"\[\[(?:[^\[\]|\n]*\|)+([^\[\]|\n]*)\]\]"  # [[page|words]]
    rf"|\[\[([^\[\]|\n]*[{JAPANESE}][^\[\]|\n]*)\]\]"  # [[語]], and no [[attribute]] of C++
    r"|\{\{[^{}|\n]*\|[^{}]*\}\}"  # {{template|...}}
    r"|'''([^'\n]+)'''"
    rf"|\[/{_BB}\]|\[{_BB}(?:=[^\]\n]*)?\](?=.*\[/)"
)
_BLANKS = re.compile(r"[ \t]+\n|\n{3,}")
_FENCE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]*`)", re.DOTALL)


class Markup(CleaningStep):
    """Takes tags, comments, entities and wiki markup out of documents, or drops those that have many."""

    action: Literal["strip", "drop"] = "strip"
    """Whether markup is taken out, or documents with more than `max_share` of it are dropped. Code in backquotes, and
    a tag that has no partner in the document, which a text may speak of, are no markup."""
    max_share: float = Field(default=0.1, ge=0, le=1)
    """The largest share of markup among the characters with which a document stays, from 0 to 1, if it is not taken
    out."""

    def change(self, text: str) -> str:
        return strip_markup(text) if self.action == "strip" else text

    def keeps(self, text: str) -> bool:
        return self.action == "strip" or len(text) - len(strip_markup(text)) <= self.max_share * len(text)

    def why(self, text: str) -> str:
        return "much markup"


def strip_markup(text: str) -> str:
    """Returns `text` without its markup; a tag that ends a line in HTML becomes a line break where there is none."""
    if not any(sign in text for sign in ("<", "&", "[[", "{{", "''", "[/")):
        return text
    parts = _FENCE.split(text)
    changed = [part if number % 2 else _strip(part) for number, part in enumerate(parts)]
    if changed == parts:
        return text
    return _BLANKS.sub(lambda match: "\n" * min(match[0].count("\n"), 2), "".join(changed)).strip()


def _strip(text: str) -> str:
    if "<" in text:
        text = _WHOLE.sub("", text)
        opened = {match[2].lower() for match in _TAG.finditer(text) if not match[1]}
        closed = {match[2].lower() for match in _TAG.finditer(text) if match[1]}
        text = _TAG.sub(lambda match: _replace_tag(match, opened & closed | _ALONE), text)
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match[0]).replace("\xa0", " "), text)
    return _WIKI.sub(lambda match: match[1] or match[2] or match[3] or "", text)


def _replace_tag(match: re.Match[str], pairs: Set[str]) -> str:
    name = match[2].lower()
    if name not in pairs and "=" not in (match[3] or ""):
        return match[0]
    return "\n" if name in _BREAKS and not (match.start() and match.string[match.start() - 1] == "\n") else ""
