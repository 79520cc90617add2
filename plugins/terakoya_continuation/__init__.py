"""The family `continuation`: `terakoya init --from`, a published model trained further. README.md says what is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from terakoya import hookimpl


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Adds `--from` and `--replay` to `init`."""
    from terakoya_continuation.commands import continued

    return {"init": continued.init}
