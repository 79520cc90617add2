"""Prints the lowest version of each dependency that pyproject.toml allows, as requirements for pip; torch is left out.

pip install $(python tools/lowest_versions.py)
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest_versions(requirements: list[str]) -> list[str]:
    """`name==version` for each of `requirements` with a lower bound, in their order."""
    pins = []
    for requirement in map(Requirement, requirements):
        bounds = [each.version for each in requirement.specifier if each.operator == ">="]
        if bounds and requirement.name != "torch":
            pins.append(f"{requirement.name}=={bounds[0]}")
    return pins


if __name__ == "__main__":
    print(" ".join(lowest_versions(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"])))
