"""Folders of checkpoints that no run wrote, for tests that look at files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya.atomic_files import FileFacts
from terakoya.runs import checkpoints

FACTS: Mapping[str, Any] = {
    "consumed_tokens": 12_345,
    "parameters": {"batch_size": {"0": 9, "1": 7}, "optimizer": {"learning_rate": 0.005}},
    "stores": {"work/データ": "5f1c"},
    "meters": [{"sums": [0.1, -2.5e-07], "seen": True}],
}


def write_manifest(folder: Path, step: int, **facts: Any) -> Path:
    """Describes all files of `folder` in a manifest, which `facts` are added to; returns its path."""
    files = {
        path.relative_to(folder).as_posix(): FileFacts.of(path).model_dump()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    content = checkpoints.with_hash({"format": checkpoints.FORMAT, "step": step, **facts, "files": files})
    (folder / "manifest.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder / "manifest.json"


def write_checkpoint(run: Path, step: int, **facts: Any) -> Path:
    """Writes a whole checkpoint of `step` into the run's folder; returns its folder."""
    folder = run / "checkpoints" / checkpoints.folder_name(step)
    (folder / "state").mkdir(parents=True)
    (folder / "state/model-00000.safetensors").write_bytes(bytes(range(100)))
    (folder / "state/optimizer-00000.safetensors").write_bytes(bytes(range(50)))
    write_manifest(folder, step, consumed_rows=16 * step, **{**FACTS, **facts})
    return folder
