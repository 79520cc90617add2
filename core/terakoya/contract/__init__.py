"""The requirements on every component, bundled or not; `terakoya plugins check` and the project's tests check them.

from terakoya import contract

contract.problems(Path("my_plugin.py"))  # [] if every check passed, else sentences that say what is missing
"""

from __future__ import annotations

from terakoya.contract.checking import check_component, check_plugin, problems
from terakoya.contract.results import CheckResult

__all__ = ["CheckResult", "check_component", "check_plugin", "problems"]
