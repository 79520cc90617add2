"""The result of one check, and running the checks of a component in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from terakoya.errors import UserError
from terakoya.plugins.discovery import PluginError, describe


class CheckFailed(Exception):  # noqa: N818 - an outcome, as is CheckSkipped
    """The component does not meet the requirement; the message says what is missing and what to do."""


class CheckSkipped(Exception):  # noqa: N818
    """The requirement does not apply to the component, or cannot be checked; the message says why."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        component: the checked component, such as `architecture my_bert`, or the plugin's file.
        requirement: what the check expects, one sentence.
        status: `passed`; `failed`; `warning`: it works today, but not in the next release; `skipped`.
        text: the reason; empty where the check passed.
    """

    component: str
    requirement: str
    status: Literal["passed", "failed", "warning", "skipped"] = "passed"
    text: str = ""

    def __str__(self) -> str:
        return f"{self.component}: {self.requirement}: {self.text or self.status}"


Check = Callable[[Any], None]
"""Returns where the requirement is met, else raises `CheckFailed` or `CheckSkipped`. The first sentence of its
docstring is the requirement."""


def run_checks(component: str, checks: Sequence[Check], case: Any) -> Iterator[CheckResult]:
    """Runs `checks` on `case` in order and yields a result for each. An error that a check raises becomes its result,
    with the line of the plugin that raised it."""
    seen = set()
    for check in checks:
        requirement = " ".join((check.__doc__ or "").split()).split(". ")[0].rstrip(".")
        try:
            _run_check(component, check, case)
        except CheckFailed as failure:
            text = str(failure)
        except CheckSkipped as reason:
            yield CheckResult(component, requirement, "skipped", str(reason))
            continue
        except (UserError, NotImplementedError) as error:
            text = error.message if isinstance(error, PluginError) else str(error)
        else:
            yield CheckResult(component, requirement)
            continue
        # The cause of one failure often fails later checks too; report each cause once.
        yield (
            CheckResult(component, requirement, "failed", text)
            if text not in seen
            else CheckResult(component, requirement, "skipped", "because of a failure above")
        )
        seen.add(text)


def _run_check(component: str, check: Check, case: Any) -> None:
    """Calls `check`. An error raised by the plugin's own code becomes a PluginError that names file and line."""
    try:
        check(case)
    except (CheckFailed, CheckSkipped, UserError):
        raise
    except NotImplementedError as error:
        raise PluginError(component, f"a method is missing: {describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(component, f"raised {describe(error)}") from error
