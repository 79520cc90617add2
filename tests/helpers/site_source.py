"""tools/site/assemble.py, imported."""

from __future__ import annotations

from tool_modules import load_tool

_module = load_tool("site/assemble")

assemble = _module.assemble
join_lines = _module.join_lines
COMMANDS = _module.COMMANDS
ELSEWHERE = _module.ELSEWHERE
rewrite_links = _module.rewrite_links
site_paths = _module.site_paths
