"""Two randomly chosen architectures of Transformers as third-party files, without a change to the core.

`random.Random("terakoya").sample(["camembert", "convbert", "ernie", "funnel", "luke", "megatron_bert", "mobilebert",
"roformer", "squeezebert", "xlm_roberta"], 2)` gave funnel and luke. Both have their own attention, without
Transformers' AttentionInterface: LUKE takes a mask for each pair of positions, Funnel pools neighbours.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from command_line import exit_code
from selection import at_night
from transformers import AutoModelForMaskedLM

import terakoya_contract as contract
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import loading as plugins
from terakoya.runs import checkpoints
from terakoya.toolkit.architectures import attention
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.model.build import build_module

EXAMPLES = Path(__file__).resolve().parents[2] / "plugins" / "examples"
POT = ["camembert", "convbert", "ernie", "funnel", "luke", "megatron_bert", "mobilebert", "roformer", "squeezebert",
       "xlm_roberta"]  # fmt: skip
TOY: dict[str, tuple[dict[str, Any], str]] = {
    "luke": (
        {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "max_position_embeddings": 32, "entity_emb_size": 8,
        },
        "packed",
    ),
    "funnel": (
        {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
        "stream",
    ),
}  # fmt: skip


def test_these_were_chosen_at_random() -> None:
    assert random.Random("terakoya").sample(POT, 2) == ["funnel", "luke"] == sorted(TOY)


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_plugins")
@pytest.mark.parametrize("name", TOY)
def test_it_passes_the_checks_of_an_architecture(name: str) -> None:
    assert [str(each) for each in contract.check_plugin(str(EXAMPLES / f"{name}.py"), train=False)
            if each.status in ("failed", "warning")] == []  # fmt: skip


@pytest.mark.usefixtures("fresh_plugins", "forks")
@pytest.mark.parametrize("name", at_night(TOY, always=("funnel",)))
def test_two_processes_train_it_and_plain_transformers_gives_its_logits(name: str, tmp_path: Path) -> None:
    sizes, layout = TOY[name]
    file = EXAMPLES / f"{name}.py"
    settings = toy.parameters(
        toy.make_store(tmp_path / "store", documents=40, seed=3),
        architecture={"type": name, **sizes},
        objective={"type": "masked_lm", "layout": layout},
        optimizer={"type": "adamw", "learning_rate": 0.01},
        max_steps=30,
        micro_batch_size=8,
        checkpoint={"save_steps": 30},
    )
    toy.train(settings, tmp_path / "run", nodes=(2,), plugins=[file])
    course = toy.losses(tmp_path / "run")
    assert course[30][0] < course[1][0] - 0.3
    assert exit_code("--plugin", file, "export", tmp_path / "run", "--out", tmp_path / "model") == 0

    # the logits of the plugin with the checkpoint's weights are those of plain Transformers
    folder = tmp_path / "run" / "checkpoints" / "step-00000030"
    manifest = checkpoints.read_manifest(folder)
    parameters = Parameters.from_dict(manifest["parameters"], source="manifest")
    module = build_module(parameters, Vocabulary.model_validate(manifest["vocabulary"])).eval()
    checkpoint_state.load_module(folder, module)
    attention.use(module, "sdpa")
    ids = torch.tensor([[2, 30, 31, 4, 33, 34, 35, 3]])
    batch = {"input_ids": ids, "position_ids": torch.arange(8)[None], "document_ids": torch.zeros_like(ids)}
    model: Any = module.model
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    with torch.no_grad():
        theirs = plain(input_ids=ids).logits
        hidden = parameters.architecture.hidden(model, batch)
        ours = parameters.architecture.logits(model, hidden)
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.usefixtures("fresh_plugins")
def test_the_ends_of_a_text_are_the_vocabularys_where_the_config_class_has_others() -> None:
    luke = plugins.load([str(EXAMPLES / "luke.py")]).component("architectures", "luke")
    config = luke(**TOY["luke"][0]).config(Vocabulary(size=64, pad=0, cls=7, sep=8, special=(0, 7, 8)))
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 7, 8)


@pytest.mark.usefixtures("fresh_plugins")
def test_funnel_refuses_rows_of_several_documents_by_name() -> None:
    funnel = plugins.load([str(EXAMPLES / "funnel.py")]).component("architectures", "funnel")
    assert funnel.document_masking == "none"
    settings = toy.parameters(Path("store"), architecture={"type": "funnel"}, objective={"type": "masked_lm"})
    with pytest.raises(UserError, match="Funnel cannot keep documents in one row apart"):
        build_module(Parameters.from_dict(settings, source="test"), Vocabulary(size=60, pad=0, mask=4))
