"""An architecture as a setting of another component: a JSON object with a "type", as at the top of the parameters."""

from __future__ import annotations

from typing import Annotated

from terakoya.components import Architecture
from terakoya.plugins.nested_component import NestedComponent

NestedArchitecture = Annotated[Architecture, NestedComponent("architectures")]
"""An architecture of any registered type, written and read with its type."""
