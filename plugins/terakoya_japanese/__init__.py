"""The command line in Japanese, where `TERAKOYA_LANG=ja` is set: see docs/design/languages.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from terakoya import Language, hookimpl


@hookimpl
def register_languages() -> Mapping[str, Callable[[], Language]]:
    """Implements `hookspecs.register_languages`."""
    return {"ja": _japanese}


def _japanese() -> Language:
    from terakoya_japanese.help import explain_usage, translate_help
    from terakoya_japanese.lines import wrap
    from terakoya_japanese.translate import translator

    return Language(translator(), wrap, translate_help, explain_usage)
