"""What every component promises, whoever brings it: checked by `terakoya plugins check` and by the project's own tests.

from terakoya import contract

contract.problems(Path("my_plugin.py"))  # [] where all is well, else sentences that say what is missing
"""

from __future__ import annotations

from terakoya.contract.checking import check_component, check_plugin, problems
from terakoya.contract.findings import Finding

__all__ = ["Finding", "check_component", "check_plugin", "problems"]
