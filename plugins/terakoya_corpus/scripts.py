"""Which script each document is written in, and what in it looks damaged, by a table of code points."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

LOOKED_AT = 20_000
"""The characters of a document, from its beginning, that are looked at."""

_CLASSES: Mapping[str, str] = {
    "space": "\t-\r \u00a0\u2000-\u200b\u2028\u2029\u3000\ufeff",
    "control": "\0-\x08\x0e-\x1f\x7f",
    "c1": "\x80-\x9f",
    "replacement": "\ufffd",
    "kana": "\u3041-\u309f\u30a1-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "recoded": "縺繧繝譁蟄譛蜷荳驥蛻",
    "han": "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7ff",
    "latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "cyrillic": "\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff",
    "hebrew": "\u0590-\u05ff",
    "arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "devanagari": "\u0900-\u097f",
    "thai": "\u0e00-\u0e7f",
    "other": "\u0530-\u058f\u0700-\u074f\u0780-\u089f\u0980-\u0dff\u0e80-\u10ff\u1200-\u1c7f\ua000-\uabff",
}
"""Classes of characters, of which one that comes later leaves to the others what they have; the rest are signs and
digits. `recoded` are the kanji that UTF-8 becomes most where it is read as Shift_JIS, and c1 where it is as Latin-1."""
_NAMES = tuple(_CLASSES)
_OF = {name: number for number, name in enumerate(_NAMES)}
_SIGNS = len(_NAMES)

JAPANESE, HAN, NO_LETTERS = "Japanese", "Han characters without kana", "no letters"
_ALPHABETS = {
    "hangul": "Korean", "latin": "Latin", "greek": "Greek", "cyrillic": "Cyrillic", "hebrew": "Hebrew",
    "arabic": "Arabic", "devanagari": "Devanagari", "thai": "Thai", "other": "other scripts",
}  # fmt: skip
SCRIPTS = (JAPANESE, HAN, *_ALPHABETS.values(), NO_LETTERS)
LETTERS = 3
"""As many letters of an alphabet as one kana, kanji or hangul counts."""
KANA_SHARE = 0.05
"""The share of kana among kana and kanji from which a text is Japanese."""

MARKUP = re.compile(
    r"</?(?:div|span|p|br|a|table|t[rdh]|[uo]l|li|script|style|img|h[1-6])\b[^<>]{0,300}>|&(?:nbsp|amp|lt|gt|quot|#\d{1,6});"
)


@cache
def _table() -> np.ndarray:
    """Returns the class of each code point, (0x110000,) uint8."""
    table = np.full(0x110000, _SIGNS, np.uint8)
    for name in reversed(_NAMES):
        for first, last in re.findall(r"(.)(?:-(.))?", _CLASSES[name], re.DOTALL):
            table[ord(first) : ord(last or first) + 1] = _OF[name]
    return table


def find_scripts(texts: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Returns how many of `texts` are in which of `SCRIPTS`, and how many have which damage."""
    if not texts:
        return Counter(), Counter()
    parts = [text[:LOOKED_AT] for text in texts]
    codes = np.frombuffer("".join(parts).encode("utf-32-le", "surrogatepass"), "<u4")
    document = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    width = _SIGNS + 1
    counts = np.bincount(document * width + _table()[codes], minlength=len(parts) * width).reshape(-1, width)
    of = {name: counts[:, number] for name, number in _OF.items()}
    han = of["han"] + of["recoded"]
    cjk = han + of["kana"]
    letters = np.stack(
        [LETTERS * cjk, *((LETTERS if name == "hangul" else 1) * of[name] for name in _ALPHABETS)], axis=1
    )
    script = np.argmax(letters, axis=1) + 1
    script[(script == 1) & (of["kana"] >= KANA_SHARE * cjk)] = 0
    script[letters.sum(axis=1) == 0] = len(SCRIPTS) - 1
    recoded = (of["recoded"] >= 3) & (of["recoded"] >= 0.1 * cjk)
    damaged = {
        "replacement characters": of["replacement"] > 0,
        "probably mojibake": recoded | ((of["c1"] >= 3) & (of["c1"] >= 0.02 * letters.sum(axis=1))),
        "control characters": of["control"] > 0,
    }
    damage = Counter({name: int(found.sum()) for name, found in damaged.items()})
    damage["remains of HTML"] = sum(("<" in part or "&" in part) and MARKUP.search(part) is not None for part in parts)
    return Counter({SCRIPTS[number]: int(count) for number, count in enumerate(np.bincount(script)) if count}), damage
