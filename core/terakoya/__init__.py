"""terakoya trains language models from raw text, Japanese first: tokenizer, token store, pre-training, export."""

__version__ = "0.1.0"

import pluggy

hookimpl = pluggy.HookimplMarker("terakoya")
"""Marks a plugin's functions as hooks; every hook is described in `terakoya.hookspecs`."""
