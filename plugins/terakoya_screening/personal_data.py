"""Finds personal data in text by its form, and by check digits where it has them.

My Number: the check digit of 総務省令 85 of 2014, article 5. Cards: the formula of Luhn and the prefixes of issuers.
Phone numbers: the lengths of Japan's numbering plan (0 and nine digits; ten for mobile, IP and some free numbers).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Kind = Literal["mail", "phone", "postal_code", "address", "my_number", "card_number"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Found(NamedTuple):
    """Personal data: `text[start:end]`."""

    start: int
    end: int
    kind: Kind


@lru_cache(maxsize=2)
def find_personal_data(text: str, kinds: frozenset[Kind]) -> tuple[Found, ...]:
    """Returns the personal data of `kinds` in their order in `text`, without overlaps: of two that
    overlap the one that begins first, or the longer one."""
    found: list[Found] = []
    if "mail" in kinds:
        found += _mails(text)
    if "address" in kinds:
        found += _addresses(text)
    if kinds & _NUMBERS:
        found += (each for each in _numbers(text) if each.kind in kinds)
    if len(found) < 2:
        return tuple(found)
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.start, -each.end)):
        if not kept or each.start >= kept[-1].end:
            kept.append(each)
    return tuple(kept)


# --------------------------------------------------------------------------------------------------------- mail

_AT = re.compile("[@＠]")
_LOCAL = re.compile(r"[A-Za-z0-9Ａ-Ｚａ-ｚ０-９._%+\-．＿＋－]{1,64}\Z")
_DOMAIN = re.compile(
    r"(?:[A-Za-z0-9Ａ-Ｚａ-ｚ０-９][A-Za-z0-9Ａ-Ｚａ-ｚ０-９\-－]{0,62}[.．]){1,8}[A-Za-zＡ-Ｚａ-ｚ]{2,24}(?![A-Za-z0-9Ａ-Ｚａ-ｚ０-９])"
)
_NOBODY = re.compile(r"(?:.*\.)?example\.(?:com|net|org|edu|jp|(?:co|ne|or|ac)\.jp)\Z")
"""Domains of documentation: RFC 2606, and the rules of JPRS for EXAMPLE.JP."""
_FILE = re.compile(r".*\.(?:png|jpe?g|gif|svg|webp|css|js|ts|py|html?|json|md|pdf)\Z")
_USER_OF_URL = re.compile(r"://[^\s/@]*\Z")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


def _mails(text: str) -> Iterator[Found]:
    end = 0
    for at in _AT.finditer(text):
        local = _LOCAL.search(text, max(end, at.start() - 64), at.start())
        domain = _DOMAIN.match(text, at.end())
        if local is None or domain is None:
            continue
        name, host = (each[0].translate(_WIDE).lower() for each in (local, domain))
        follows = text[domain.end() : domain.end() + 1]
        if _NOBODY.match(host) or _FILE.match(host) or (name == "git" and follows in (":", "/")):
            continue
        if _USER_OF_URL.search(text, max(0, local.start() - 64), local.start()):
            continue
        end = domain.end()
        start = local.start() + len(local[0]) - len(local[0].lstrip(".．-－"))
        if start < at.start():
            yield Found(start, end, "mail")


# ------------------------------------------------------------------------------------------------------ addresses

_PREFECTURES = (
    "北海道|青森県|岩手県|宮城県|秋田県|山形県|福島県|茨城県|栃木県|群馬県|埼玉県|千葉県|東京都|神奈川県|新潟県|富山県|石川県|"
    "福井県|山梨県|長野県|岐阜県|静岡県|愛知県|三重県|滋賀県|京都府|大阪府|兵庫県|奈良県|和歌山県|鳥取県|島根県|岡山県|広島県|"
    "山口県|徳島県|香川県|愛媛県|高知県|福岡県|佐賀県|長崎県|熊本県|大分県|宮崎県|鹿児島県|沖縄県"
)
_CITIES = (
    "札幌市|仙台市|さいたま市|千葉市|横浜市|川崎市|相模原市|新潟市|静岡市|浜松市|名古屋市|京都市|大阪市|堺市|神戸市|岡山市|"
    "広島市|北九州市|福岡市|熊本市"
)
"""The cities with wards (政令指定都市), whose addresses are often written without the prefecture."""
_D = "0-9０-９"
_DASH = "-‐‑‒–—―−－ーｰ"
_NUMBER = rf"[{_D}〇一二三四五六七八九十百]{{1,5}}"
_STOP = r"\n、。，．,.（）()「」『』・：:；/をはがもにで"
_PLACE = re.compile(f"{_PREFECTURES}|{_CITIES}")
_ADDRESS = re.compile(
    rf"(?:(?:{_PREFECTURES})[ \u3000]?[^\s{_D}{_STOP}]{{1,7}}?[市区町村郡]|(?:{_CITIES})[^\s{_D}{_STOP}]{{1,4}}?区)"
    rf"[^{_STOP}]{{0,20}}?"
    rf"(?:{_NUMBER}丁目[ \u3000]?{_NUMBER}|{_NUMBER}番地|{_NUMBER}番{_NUMBER}|{_NUMBER}[{_DASH}]{_NUMBER}"
    rf"|[{_D}]{{1,5}}の[{_D}])"
    rf"(?:[{_DASH}の](?={_NUMBER})|{_NUMBER}|番地|番|号室?){{0,10}}"
)


def _addresses(text: str) -> Iterator[Found]:
    for place in _PLACE.finditer(text):  # far quicker than a search for the whole
        if (match := _ADDRESS.match(text, place.start())) is not None:
            yield Found(*match.span(), "address")


# -------------------------------------------------------------------------------------------------------- numbers

_NUMBERS: frozenset[Kind] = frozenset({"phone", "postal_code", "my_number", "card_number"})
_SEPARATOR = rf"{_DASH}()（）. \u3000"
_RUN = re.compile(rf"[{_D}](?:[{_SEPARATOR}]{{0,2}}[{_D}]){{6,}}")
_PLAIN: dict[int, int | str] = {
    **_WIDE,
    **dict.fromkeys(map(ord, _DASH), "-"),
    0x3000: " ",
}
_PHONE_NAMED = re.compile(
    r"(?:tel|phone|fax|電話|携帯|連絡先|でんわ|ﾃﾞﾝﾜ|☎|℡|📞|📱)[^0-9０-９\n]{0,12}\Z", re.IGNORECASE
)
_POSTAL_NAMED = re.compile(r"(?:〒|郵便番号|zip)[^0-9０-９\n]{0,6}\Z", re.IGNORECASE)
_PREFECTURE_FOLLOWS = re.compile(rf"[ \u3000\n]{{0,2}}(?:{_PREFECTURES})")

_TEN, _ELEVEN = (rf"(?=(?:[-() .]{{0,2}}\d){{{digits}}}(?!-?\d))" for digits in (10, 11))
_PHONE = re.compile(
    rf"{_ELEVEN}(?:\(?0[5789]0\)?[-( ]?\d{{4}}[-) ]?\d{{4}}|0800-\d{{3}}-\d{{4}})"  # mobile, IP and free
    rf"|{_TEN}\(?0(?:120|570|990)(?:[-() ]{{0,2}}\d){{6}}"  # free and shared cost
    rf"|{_TEN}\(?0(?:[346]|[1-9]\d{{1,3}})(?:-|\(|\) ?)\d{{1,4}}(?:-|\) ?)\d{{4}}"  # fixed: area, exchange, four digits
    r"|(?P<abroad>\+81[- ]?(?:\(0\) ?)?[1-9]\d{0,3}[- ]?\d{1,4}[- ]?\d{4})"
    rf"|(?P<named>{_TEN}0\d(?:[. ]?\d){{8}}|{_ELEVEN}0[5789]0(?:[. ]?\d){{8}})"  # only beside a word such as 電話
)
_PATTERNS: Mapping[Kind, re.Pattern[str]] = {
    "card_number": re.compile(r"\d{14,19}|\d{4}([- ])\d{4}\1\d{4}\1\d{4}|\d{4}([- ])\d{6}\2\d{4,5}"),
    "my_number": re.compile(r"\d{12}|\d{4}([- ])\d{4}\1\d{4}"),
    "phone": _PHONE,
    "postal_code": re.compile(r"\d{3}-?\d{4}"),
}
_CONTINUES = re.compile(rf"[{_D}]|[{_DASH}][{_D}]")
_ISSUERS = re.compile(
    r"4\d{15}(?:\d{3})?\Z|5[1-5]\d{14}\Z|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}\Z|3[47]\d{13}\Z"
    r"|35(?:2[89]|[3-8]\d)\d{12}\Z|3(?:0[0-59]|6\d|[89]\d)\d{11}\Z|6(?:011|4[4-9]\d|5\d\d)\d{12}\Z|62\d{14,17}\Z"
)
"""Visa, Mastercard, American Express, JCB, Diners Club, Discover, UnionPay; not Visa's old 13 digits, which are also
those of a JAN code."""
_PART_BEFORE = re.compile(
    r"(?:[A-Za-z](?<!tel)(?<!fax)(?<!phone)|[A-Za-z]/|[_=#%$¥￥\\]|[-‐‑−－]|[0-9０-９][.,．，])\Z", re.IGNORECASE
)
_PART_AFTER = re.compile(r"[A-Za-z_=%]|[.,．，][0-9０-９]|[-‐‑−－][A-Za-z]")
"""What stands beside digits that are a part of something longer: a part number, an amount, an address on the web."""


def _numbers(text: str) -> Iterator[Found]:
    for run in _RUN.finditer(text):
        first, last = run.span()
        first -= first > 0 and text[first - 1] in "(（+＋"
        if _PART_BEFORE.search(text, max(0, first - 8), first) or _PART_AFTER.match(text, last):
            continue
        plain, position = text[first:last].translate(_PLAIN), 0
        while position < len(plain):
            before, start = text[max(0, first + position - 20) : first + position], first + position
            for kind, pattern in _PATTERNS.items():
                match = pattern.match(plain, position)
                if match is not None and _is_whole(kind, match, before, text[first + match.end() : last + 8]):
                    start -= kind == "postal_code" and before.endswith("〒")
                    start += match[0][0] == "(" and ")" not in match[0]  # a bracket around more than the number
                    position = match.end()
                    yield Found(start, first + position, kind)
                    break
            else:
                position += 1
                while position < len(plain) and (plain[position - 1].isdigit() or plain[position - 1] in "-."):
                    position += 1


def _is_whole(kind: Kind, match: re.Match[str], before: str, after: str) -> bool:
    """Whether the digits of `match` are all, and a number of `kind` by their check digit or the text beside them."""
    if _CONTINUES.match(after):
        return False
    digits = "".join(filter(str.isdigit, match[0]))
    if kind == "card_number":
        return is_card_number(digits)
    if kind == "my_number":
        return is_my_number(digits)
    if kind == "postal_code":
        return bool(_POSTAL_NAMED.search(before) or ("-" in match[0] and _PREFECTURE_FOLLOWS.match(after)))
    if match["abroad"]:
        return len(digits) - ("(0)" in match[0]) in (11, 12)
    return not match["named"] or bool(_PHONE_NAMED.search(before))


def is_card_number(digits: str) -> bool:
    """Whether `digits` begin as those of an issuer and satisfy the formula of Luhn."""
    if not _ISSUERS.match(digits):
        return False
    doubled = [int(digit) * (2 if number % 2 else 1) for number, digit in enumerate(reversed(digits))]
    return sum(each - 9 if each > 9 else each for each in doubled) % 10 == 0


def is_my_number(digits: str) -> bool:
    """Whether the last of twelve `digits` is the check digit of a My Number."""
    weighted = sum(
        int(digit) * weight for digit, weight in zip(digits, (6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2), strict=False)
    )
    return int(digits[11]) == (0 if weighted % 11 <= 1 else 11 - weighted % 11)
