"""`plugins check` of a third-party encoder-decoder: it passes every check, and each check fails for a broken copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selection import at_night

import terakoya_contract as contract
from terakoya.plugins import loading as plugins
from terakoya_contract import training

pytestmark = pytest.mark.usefixtures("fresh_plugins")

MT5 = '''from terakoya import hookimpl
from terakoya.components import Architecture


class MT5(Architecture):
    """mT5 (Xue et al., 2021, arXiv:2010.11934): T5 1.1 with a vocabulary head of its own."""

    heads = frozenset({"seq2seq"})
    document_masking = "mask_4d"
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    dropout_rate: float = 0.1
    """The share of values that dropout sets to zero."""

    def config(self, vocabulary):
        from transformers import MT5Config

        return MT5Config(
            **self.model_dump(), vocab_size=vocabulary.size, pad_token_id=vocabulary.pad,
            decoder_start_token_id=vocabulary.pad, eos_token_id=vocabulary.sep,
        )

    def build(self, vocabulary, head):
        from transformers import MT5ForConditionalGeneration

        return MT5ForConditionalGeneration(self.config(vocabulary))

    def hidden(self, model, batch):
        from terakoya.toolkit.architectures.attention import additive, causal_mask, document_mask

        source, target = batch["document_ids"], batch["decoder_document_ids"]
        encoded = model.encoder(input_ids=batch["input_ids"], attention_mask=additive(document_mask(source)))[0]
        return model.decoder(
            input_ids=batch["decoder_input_ids"],
            attention_mask=additive(causal_mask(target)),
            encoder_hidden_states=encoded,
            encoder_attention_mask=additive(document_mask(target, source)),
            use_cache=False,
        )[0]

    def logits(self, model, hidden):
        return model.lm_head(hidden)

    def blocks(self, model):
        return [*model.encoder.block, *model.decoder.block]


@hookimpl
def register_architectures():
    return {"mt5": MT5}
'''

BROKEN = {
    "its own target": ("causal_mask(target)", "document_mask(target)", r"sees what it has to predict"),
    "neighbours in the encoder": (
        "document_mask(source)", "document_mask(source.clamp(max=0))", r"states differ by .* when another shares",
    ),
    "neighbours in the decoder": (
        "causal_mask(target)", "causal_mask(target.clamp(max=0))", r"states differ by .* when another shares",
    ),
    "neighbours between the two": (
        "document_mask(target, source)", "document_mask(target.clamp(max=0), source.clamp(max=0))",
        r"one document's source changes the target of another",
    ),
    "nothing of the source": (
        "encoder_hidden_states=encoded", "encoder_hidden_states=0 * encoded",
        r"at position 0 of the source does not change all hidden",
    ),
    "the encoder's states": (
        "return model.decoder(", "return encoded\n        model.decoder(",
        r"for decoder_input_ids \(2, 13\) hidden returned \(2, 24, 16\)",
    ),
    "other logits": ("return model.lm_head(hidden)", "return model.lm_head(hidden * 2)", r"returns other numbers"),
}  # fmt: skip


def load_mt5(file: Path, source: str) -> plugins.Registration:
    """Writes `source` to `file` and returns the architecture that it registers."""
    file.write_text(source, encoding="utf-8")
    (offer,) = (each for each in plugins.load([str(file)]).components() if each.name == "mt5")
    return offer


def test_an_encoder_decoder_passes_every_check(tmp_path: Path) -> None:
    results = list(contract.check_component(load_mt5(tmp_path / "mt5.py", MT5), train=False))
    assert [str(result) for result in results if result.status != "passed"] == [
        "architecture mt5: A block whose output_layers are 0 returns the hidden states that it received: it names no "
        "output_layers",
        "architecture mt5: Processes that share its blocks by tensor_partition compute the same as one process: "
        "tensor_partition is None: parallel.tp_size is refused",
        "architecture mt5: Pipeline stages made by keep_stage_blocks compute one after another the same as the whole "
        "model: keep_stage_blocks is not implemented: parallel.pp_size is refused",
        "architecture mt5: A row of max_sequence_length works: it has no maximum",
        "architecture mt5: A model that takes over its `phase_settings` in the middle of a run computes what a new one "
        "with them does: phases change nothing of it",
        "architecture mt5: With mup, training changes activations as much in a wide model as in a narrow one: it names "
        "no mup_widths: the key mup is refused",
    ]
    assert sum("seq2seq" in result.requirement for result in results) == 2


@pytest.mark.nightly
def test_an_encoder_decoder_learns_resumes_and_loads(tmp_path: Path) -> None:
    load_mt5(tmp_path / "mt5.py", MT5)
    names = {"architectures": "mt5", "objectives": "span_corruption", "optimizers": "adamw", "schedules": "linear"}
    training.run(names, tmp_path / "run")


@pytest.mark.parametrize("case", at_night(BROKEN, always=["its own target"]))
def test_a_broken_encoder_decoder_fails(case: str, tmp_path: Path) -> None:
    old, new, message = BROKEN[case]
    assert MT5.count(old) == 1
    offer = load_mt5(tmp_path / "mt5.py", MT5.replace(old, new))
    results = (str(result) for result in contract.check_component(offer, train=False) if result.status == "failed")
    assert any(re.search(message, text) for text in results)
