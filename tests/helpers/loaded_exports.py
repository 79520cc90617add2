"""Exports that plain Transformers has loaded, compared with the models that were trained."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from terakoya.conversion.export import build_models, export
from terakoya.runs import checkpoints
from terakoya.toolkit.architectures import attention


def loads(run: Path, out: Path) -> dict[str, torch.nn.Module]:
    """Exports `run`; each model that plain Transformers loads has the logits of the trained model."""
    done = export(run, out)
    trained = build_models(done.checkpoint, checkpoints.read_manifest(done.checkpoint))
    ids = torch.tensor([[2, 30, 31, 4, 33, 34, 35, 3]])
    found = {}
    for folder, model in done.models.items():
        loaded = getattr(transformers, model).from_pretrained(done.out / folder, local_files_only=True).eval()
        attention.release(trained[folder])
        further = {"decoder_input_ids": ids} if loaded.config.is_encoder_decoder else {}
        with torch.no_grad():
            theirs, ours = (each(input_ids=ids, **further)[0] for each in (loaded, trained[folder].eval()))
        assert (theirs - ours).abs().max() < 1e-5
        found[folder] = loaded
    return found
