"""One thing that was looked at, and running many such looks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from terakoya.errors import UserError
from terakoya.plugins.discovery import PluginError, describe


class Wrong(Exception):  # noqa: N818 - a verdict
    """The component does not keep its promise; the message says in plain words what is missing and what to do."""


class NotLookedAt(Exception):  # noqa: N818 - a verdict, too
    """There is nothing here to look at; the message says why."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what was found.

    Attributes:
        component: what it belongs to, such as `architecture my_bert`, or the plugin's file.
        promise: what is expected, one sentence.
        verdict: `kept`; `wrong`; `warning`: works today, not in the next release; `not looked at`.
        text: why, in plain words; empty where the promise is kept.
    """

    component: str
    promise: str
    verdict: Literal["kept", "wrong", "warning", "not looked at"] = "kept"
    text: str = ""

    def __str__(self) -> str:
        return f"{self.component}: {self.promise}: {self.text or self.verdict}"


Check = Callable[[Any], None]
"""Returns where the promise is kept, raises `Wrong` or `NotLookedAt` where not. The first sentence of its docstring is
the promise."""


def run(component: str, checks: Sequence[Check], subject: Any) -> Iterator[Finding]:
    """The finding of each of `checks` on `subject`, in order. What one raises becomes its finding, with the place."""
    seen = set()
    for check in checks:
        promise = " ".join((check.__doc__ or "").split()).split(". ")[0].rstrip(".")
        try:
            _attempt(component, check, subject)
        except Wrong as wrong:
            text = str(wrong)
        except NotLookedAt as reason:
            yield Finding(component, promise, "not looked at", str(reason))
            continue
        except (UserError, NotImplementedError) as error:
            text = error.message if isinstance(error, PluginError) else str(error)
        else:
            yield Finding(component, promise)
            continue
        # what breaks one look breaks those after it: once is enough
        yield (
            Finding(component, promise, "wrong", text)
            if text not in seen
            else Finding(component, promise, "not looked at", "because of what is wrong above")
        )
        seen.add(text)


def _attempt(component: str, check: Check, subject: Any) -> None:
    """Calls `check`; whatever the plugin's own code raises becomes a PluginError that names the place."""
    try:
        check(subject)
    except (Wrong, NotLookedAt, UserError):
        raise
    except NotImplementedError as error:
        raise PluginError(component, f"a method is missing: {describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(component, f"raised {describe(error)}") from error
