"""`plugins check` looks at an encoder-decoder that somebody else brings: its promises, and how each breaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from terakoya import contract
from terakoya.contract import training
from terakoya.plugins import loading as plugins

MT5 = '''from terakoya import hookimpl
from terakoya.components import Architecture


class MT5(Architecture):
    """mT5 (Xue et al., 2021, arXiv:2010.11934): T5 1.1 with a vocabulary head of its own."""

    heads = frozenset({"seq2seq"})
    isolation = "mask4d"
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    dropout_rate: float = 0.1

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
    "what it is to write": ("causal_mask(target)", "document_mask(target)", r"it sees what it is to write"),
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
        "encoder_hidden_states=encoded", "encoder_hidden_states=0 * encoded", r"at place 0 of the source leaves hidden",
    ),
    "the encoder's states": (
        "return model.decoder(", "return encoded\n        model.decoder(",
        r"for decoder_input_ids \(2, 13\) hidden returned \(2, 24, 16\)",
    ),
    "other logits": ("return model.lm_head(hidden)", "return model.lm_head(hidden * 2)", r"gives other numbers"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test loads plugins as a new process would."""
    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setattr(plugins, "_loaded", {})
    for variable in (plugins.PLUGINS_VARIABLE, plugins.WITHOUT_VARIABLE):
        monkeypatch.setenv(variable, "")


def mine(file: Path, source: str) -> plugins.Offer:
    """The architecture that `source`, written to `file`, offers."""
    file.write_text(source, encoding="utf-8")
    (offer,) = (each for each in plugins.load([str(file)]).components() if each.name == "mt5")
    return offer


def test_an_encoder_decoder_keeps_every_promise(tmp_path: Path) -> None:
    found = list(contract.check_component(mine(tmp_path / "mt5.py", MT5), train=False))
    assert [str(each) for each in found if each.verdict != "kept"] == [
        "architecture mt5: Processes that share its blocks by tensor_partition compute what one does: tensor_partition "
        "is None: parallel.tp_size is refused",
        "architecture mt5: Stages of a pipeline, which it is cut into by cut, compute one after another what the whole "
        "does: cut is not written: parallel.pp_size is refused",
        "architecture mt5: A row of max_sequence_length works: it has no bound",
    ]
    assert sum("seq2seq" in each.promise for each in found) == 2


def test_an_encoder_decoder_learns_resumes_and_loads(tmp_path: Path) -> None:
    mine(tmp_path / "mt5.py", MT5)
    names = {"architectures": "mt5", "objectives": "span_corruption", "optimizers": "adamw", "schedules": "linear"}
    training.run(names, tmp_path / "run")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_promise_of_an_encoder_decoder_is_told(case: str, tmp_path: Path) -> None:
    old, new, said = BROKEN[case]
    assert MT5.count(old) == 1
    offer = mine(tmp_path / "mt5.py", MT5.replace(old, new))
    wrong = [str(each) for each in contract.check_component(offer, train=False) if each.verdict == "wrong"]
    assert any(re.search(said, text) for text in wrong), wrong
