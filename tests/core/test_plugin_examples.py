"""The examples of plugins/README.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from terakoya import attention, plugins
from terakoya.data.vocab import Vocabulary

PAGE = Path(__file__).resolve().parents[2] / "plugins" / "README.md"
EXAMPLES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
VOCABULARY = Vocabulary(size=60, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> plugins.Registry:
    """The bundled plugins and one example, loaded as `--plugin FILE` loads it."""
    file = tmp_path / str(request.param)
    file.write_text(EXAMPLES[request.param], encoding="utf-8")
    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setenv(plugins.PLUGINS_VARIABLE, "")
    return plugins.load([str(file)])


@pytest.mark.parametrize("registry", ["albert.py"], indirect=True)
def test_the_architecture_learns_exports_and_keeps_documents_apart(registry: plugins.Registry, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    settings = dict.fromkeys(("embedding_size", "hidden_size", "intermediate_size"), 16)
    architecture = registry.component("architectures", "albert")(
        **settings, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
    )
    objective = registry.component("objectives", "masked_lm")()
    torch.manual_seed(0)
    module = objective.build(architecture, VOCABULARY)
    attention.use(module, "sdpa")
    model = objective.exports(module)[""]

    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 60, (1, 12)))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = {"input_ids": ids, "document_ids": documents, "position_ids": positions}
    alone = {name: value[:, 5:] for name, value in packed.items()}
    module.eval()
    difference = architecture.hidden(model, packed)[:, 5:] - architecture.hidden(model, alone)
    assert difference.abs().max() < 1e-5

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batch = {**packed, "masked_positions": torch.tensor([1, 8]), "masked_labels": ids[0, [1, 8]]}
    losses = []
    for _ in range(10):
        loss = module(batch)["mlm_loss"]
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2

    attention.release(model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert type(again).__name__ == "AlbertForMaskedLM"


@pytest.mark.parametrize("registry", ["diary.py"], indirect=True)
def test_the_event_plugin_writes_its_diary(registry: plugins.Registry, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(rank=0, world_size=2, folder=tmp_path, step=0, consumed_tokens=0)
    registry.hook.run_started(run)
    run.step, run.consumed_tokens = 5, 1280
    registry.hook.checkpoint_saved(run, tmp_path / "checkpoints" / "step-00000005")
    registry.hook.run_finished(run, None)
    lines = (tmp_path / "diary.txt").read_text(encoding="utf-8").splitlines()
    assert [line[21:] for line in lines] == [
        "step 0  started with 2 process(es)",
        "step 5  saved step-00000005 after 1280 tokens",
        "step 5  finished",
    ]
    run.rank = 1
    registry.hook.run_finished(run, KeyboardInterrupt())
    assert len((tmp_path / "diary.txt").read_text(encoding="utf-8").splitlines()) == 3


def test_the_page_names_every_event_and_every_kind() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for hook in [*plugins.EVENTS, *plugins.NOUNS.values()]:
        assert f"`{hook}" in page, hook
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert link.startswith("https://") or (PAGE.parent / link).exists(), link
