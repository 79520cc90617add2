"""Runs a script whose `AutoTokenizer` gives the fast tokenizer: `python -m terakoya_tokenizer SCRIPT ARGUMENTS...`."""

from __future__ import annotations

import runpy
import sys

from terakoya_tokenizer import register

if len(sys.argv) < 2:
    sys.exit("usage: python -m terakoya_tokenizer SCRIPT ARGUMENTS...")
register()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
