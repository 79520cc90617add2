"""tools/site/assemble.py, imported."""

from __future__ import annotations

import importlib.util

from documented_commands import ROOT

_spec = importlib.util.spec_from_file_location("assemble", ROOT / "tools" / "site" / "assemble.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

assemble = _module.assemble
join_lines = _module.join_lines
COMMANDS = _module.COMMANDS
ELSEWHERE = _module.ELSEWHERE
rewrite_links = _module.rewrite_links
site_paths = _module.site_paths
