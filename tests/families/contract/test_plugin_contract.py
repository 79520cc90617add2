# ruff: noqa: E501 (a table)
"""Each check fails, with a clear message, for a template with one mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selection import at_night
from typer.testing import CliRunner

import terakoya_contract as contract
from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.hookspecs import INTERFACE
from terakoya_contract import checking, training
from terakoya_contract.commands.new import SINGULAR, TEMPLATES, new

pytestmark = pytest.mark.usefixtures("fresh_plugins")


def with_method(head: str, *body: str) -> tuple[str, str]:
    """What the template's last lines are replaced with, so that its class has this method too."""
    lines = [f"    def {head}:", *(f"        {line}" for line in body)]
    return "\n\n\n@hookimpl", "\n\n" + "\n".join(lines) + "\n\n\n@hookimpl"


CLIPPING = (
    "import torch",
    "class Clipping(torch.optim.SGD):",
    "    def step(self, closure=None):",
    "        weights = [each for group in self.param_groups for each in group['params']]",
    "        torch.nn.utils.clip_grad_norm_(weights, 0.1)",
    "        return super().step(closure)",
    "return Clipping(module.parameters(), lr=self.learning_rate)",
)
"""An optimizer whose updates depend on the norm of all gradients."""
BROKEN = {
    "a heavy import at module level": (
        "schedule", "import math", "import math\n\nimport torch",
        r"loading it imports torch: .*mine\.py:\d+\. Move that import into the methods",
    ),
    "an unknown hook": (
        "schedule", "def register_schedules", "def register_schedule",
        'there is no hook register_schedule; did you mean "register_schedules"',
    ),
    "no docstring": ("schedule", '    """Fields are the keys of the parameter JSON."""\n', "", "has no docstring"),
    "a setting without a description": (
        "schedule", '    """The share of the peak at the end."""\n', "", "floor has no description",
    ),
    "settings that are not frozen": (
        "schedule", "    warmup_steps", '    model_config = {"frozen": False}\n    warmup_steps', "frozen=False; leave that",
    ),
    "a setting that can change": (
        "schedule", "    warmup_steps: NonNegativeInt = 0", "    warmup_steps: NonNegativeInt = 0\n    lows: list[int] = []",
        "use tuple for list",
    ),
    "unknown keys accepted": (
        "schedule", "    warmup_steps", '    model_config = {"extra": "ignore"}\n    warmup_steps', "accepted silently",
    ),
    "a required setting without test_settings": (
        "schedule", "    warmup_steps: NonNegativeInt = 0", "    warmup_steps: NonNegativeInt",
        r'warmup_steps has no default; .*test_settings: ClassVar = \{"warmup_steps"',
    ),
    "a method that is missing": ("schedule", "def factor", "def factors", "factor missing; see terakoya.components.Sch"),
    "detached jobs that cannot be found again": (
        "launcher", "    def plan", "    detached: ClassVar[bool] = True\n\n    def plan", "find_job missing; see terak",
    ),
    "a factor that is not a number": ("schedule", "return self.floor +", "return float('nan') +", "factor is nan"),
    "a schedule with a memory": (
        "schedule", "        done = min", "        done = __import__('random').random() or min", "another factor",
    ),
    "an optimizer that forgets weights": (
        "optimizer", "torch.optim.SGD(trainable,", "torch.optim.SGD(trainable[:2],", "it updates 2 tensors",
    ),
    "an optimizer with another learning rate": (
        "optimizer", "lr=self.learning_rate", "lr=self.learning_rate / 2", "a group's lr is 0.025",
    ),
    "an optimizer that climbs": (
        "optimizer", "fused=fused)", "fused=fused, maximize=True)", "the loss went from",
    ),
    "an optimizer that is not elementwise": (
        "optimizer", "SGD(trainable, lr=self.learning_rate, momentum=self.momentum, fused=fused)",
        "Adafactor(trainable, lr=self.learning_rate)",
        "declares that its updates are elementwise, but on parts of tensors .* is updated differently, by .*tensorwise: Cl",
    ),
    "an optimizer that is not tensorwise": (
        "optimizer", "\n\n\n@hookimpl",
        with_method("build(self, module, *, fused)", *CLIPPING)[1].replace("\n\n\n", "\n\n    elementwise, tensorwise = False, True\n\n\n"),
        "declares that its updates are tensorwise, but on some of the tensors .* is updated differently",
    ),
    "a step that drops without a count": (
        "cleaning_step", "    min_different", "    drops = False\n    min_different", "what is dropped is counted",
    ),
    "a step that decides by chance": (
        "cleaning_step", "return len(set(text)) >=", "return __import__('random').random() * 6 >", "decides otherwise about",
    ),
    "a step that drops what is not there": (
        "cleaning_step", "    def keeps",
        "    @property\n    def note_type(self):\n        import numpy\n        return numpy.dtype('u1')\n\n"
        "    def note(self, text):\n        return 0\n\n    def drop(self, notes, left):\n        return [1]\n\n    def keeps",
        "documents that are not left",
    ),
    "words with white space": (
        "word_finder", "word.span() for word in pattern.finditer(text)", "(0, len(text))", "has white space at its ends",
    ),
    "words that depend on the texts beside them": (
        "word_finder", "        return find\n", "        return lambda texts: find([text[: 50 // len(texts)] for text in texts])\n",
        "a text alone has other words than beside other texts",
    ),
    "no heads": ("architecture", '{"masked": "BertForMaskedLM"}', "{}", "name at least one of masked"),
    "a vocabulary of another size": (
        "architecture", *with_method("config_arguments(self, vocabulary)", 'return {**super().config_arguments(vocabulary), "vocab_size": 99}'),
        "its vocab_size is 99, expected vocabulary.size",
    ),
    "padding left out": ("architecture", "    config_class", "    config_ids: ClassVar = {}\n    config_class", "its pad_token_id is 0, expected"),
    "a field that the config would ignore": (
        "architecture", "    hidden_size", "    hidden_dropout: float = 0.0\n    hidden_size",
        'BertConfig has no hidden_dropout and would ignore it .*undeclared_arguments.*did you mean "hidden_dropout_prob"',
    ),
    "an end of texts that is another token": (
        "architecture", *with_method("config_arguments(self, vocabulary)", 'return {**super().config_arguments(vocabulary), "eos_token_id": 0}'),
        r"its eos_token_id is 0, expected vocabulary\.eos or vocabulary\.sep, which are 6 and 2",
    ),
    "weights from a generator": (
        "architecture", *with_method("build(self, vocabulary, head)", "import torch", "model = super().build(vocabulary, head)",
        "torch.nn.init.normal_(model.cls.predictions.bias, generator=torch.Generator().manual_seed(id(model)))", "return model"),
        "two models from one seed differ, in cls.predictions.bias",
    ),
    "an output where hidden states belong": (
        "architecture", *with_method("hidden(self, model, batch)", "from terakoya.toolkit.architectures import attention",
        "return model.bert(batch['input_ids'], **attention.arguments(model, batch))"),
        r"hidden returned BaseModelOutput\w*, expected a tensor; .*last_hidden_state",
    ),
    "documents not kept apart at all": (
        "architecture", *with_method("hidden(self, model, batch)", "return model.bert(batch['input_ids'])[0]"),
        r"call its body with \*\*attention\.arguments",
    ),
    "hidden states of another shape": (
        "architecture", *with_method("hidden(self, model, batch)", "return super().hidden(model, batch)[:, 0]"),
        r"for input_ids \(2, 24\) hidden returned \(2, 16\)",
    ),
    "logits that need rows": (
        "architecture", *with_method("logits(self, model, hidden)", "return model.cls(hidden).view(-1, 24, model.config.vocab_size)"),
        r"logits returned \(2, 24, 64\), expected|raised RuntimeError|logits returned",
    ),
    "documents that see each other": (
        "architecture", *with_method("hidden(self, model, batch)",
        "return super().hidden(model, {**batch, 'document_ids': batch['document_ids'].clamp(max=0)})"),
        "differ by .* when another shares its row",
    ),
    "a weight that nothing reaches": (
        "architecture", *with_method("build(self, vocabulary, head)", "import torch", "model = super().build(vocabulary, head)",
        "model.further = torch.nn.Linear(2, 2)", "return model"),
        r"no gradient reaches further\.bias, further\.weight: with several",
    ),
    "blocks that are not there": (
        "architecture", *with_method("blocks(self, model)", "return []"), "blocks .*expected a list of modules",
    ),
    "a block that asks for values": (
        "architecture", *with_method("build(self, vocabulary, head)", "model = super().build(vocabulary, head)",
        "block = self.blocks(model)[0]", "forward = block.forward",
        "block.forward = lambda states, *rest, **more: forward(states if states.sum().item() > 99 else states * 1, *rest, **more)", "return model"),
        r"its blocks cannot be compiled: .*mine\.py.*compile_obstacle",
    ),
    "a bound that is too high": (
        "architecture", *with_method("max_sequence_length(self)", "return self.max_position_embeddings + 1"), "is 49, but a row of 49 tokens fails",
    ),
    "other logits than the model's own": (
        "architecture", *with_method("logits(self, model, hidden)", "return model.cls(hidden) * 2"),
        r"returns other numbers on a document .*the logit of vocabulary id \d+; the padding id is 3\)\. Either they",
    ),
    "padding that counts": (
        "architecture", *with_method("hidden(self, model, batch)",
        "return super().hidden(model, batch) + (batch['document_ids'] < 0).float().mean()"),
        "on a document with 5 padding tokens .*Without padding the numbers agree, .* not 1 and 0",
    ),
    "no loss key": (
        "objective", '"example_loss": torch', '"mine": torch', "forward did not return example_loss, only mine",
    ),
    "no loss at all": ("objective", 'LossTerm("hidden", 1.0)', 'LossTerm("hidden")', "no term has a weight"),
    "a count that is missing": ("objective", ', "hidden": int(chosen.sum())', "", "the batch does not count hidden"),
    "a batch of chance": (
        "objective", "drawn = draws(", "drawn = np.random.default_rng().permuted(draws(",
        "two batches of the same rows differ|another",
    ),
    "neighbours that matter": (
        "objective", "draws(rows.keys[:, None]", "draws(rows.keys[:1, None] + 0 * rows.keys[:, None]",
        "depend on which other rows are in the batch",
    ),
    "means for sums": ("objective", 'reduction="sum"', 'reduction="mean"', "of its two halves together"),
    "a mean over nothing": (
        "objective", 'reduction="sum"', 'reduction="mean"', "a row of padding is nan; a sum over nothing is 0",
    ),
    "padding counted": ("objective", "real = rows.document_ids >= 0", "real = rows.tokens >= 0", "without padding"),
    "nothing to export": ("objective", 'return {"": module.model}', "return {}", "exports returned {}"),
    "exports that no run can start from": (
        "objective", 'return {"": module.model}', 'return {"": __import__("copy").deepcopy(module.model)}',
        "load_models refuses the models that exports returned: BertForMaskedLM: this model cannot be set",
    ),
    "a load_models that forgets": (
        "objective", 'return {"": module.model}', 'return {"": module.model}\n\n    def load_models(self, module, models):\n        pass',
        "of the model, .* differs after exports and load_models",
    ),
    "a folder it does not recognise": (
        "tokenizer", "if file.is_file() else None", "if False else None", "does not recognise the folder",
    ),
    "every folder is its own": (
        "tokenizer", 'return cls.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None',
        "return cls()", "accepts an empty folder",
    ),
    "other ids than Transformers'": (
        "tokenizer", "return LineEncoder(self.load(folder)",
        "loaded = self.load(folder)\n        loaded.backend_tokenizer.normalizer = __import__('tokenizers').normalizers"
        ".Lowercase()\n        return LineEncoder(loaded",
        "for 'Reading.* its ids are",
    ),
    "a fingerprint of the path": (
        "tokenizer", 'return {"tokenizer": hashlib', 'return {"where": str(folder), "tokenizer": hashlib', "leave out paths",
    ),
    "an export outside its folder": (
        "exporter", "for name, model in models.items():", "out = out.parent / 'other'\n        for name, model in models.items():",
        "wrote nothing into the folder",
    ),
}  # fmt: skip


def check_nothing(case: object) -> None:
    """Stands in for a check that a test does not need."""


EACH_TIME = [
    "a heavy import at module level", "a setting without a description", "a schedule with a memory",
    "an optimizer that forgets weights", "a step that drops without a count", "words with white space",
    "padding left out", "documents that see each other", "a count that is missing", "means for sums",
    "a folder it does not recognise", "an export outside its folder",
]  # fmt: skip
"""Of each kind one or two."""


@pytest.mark.parametrize("case", at_night(BROKEN, always=EACH_TIME))
def test_a_broken_template_fails_with_a_clear_message(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, old, new_text, message = BROKEN[case]
    if "heavy import" not in case:  # the check that starts another Python, which takes longer than all others
        monkeypatch.setattr(checking, "check_imports_without_torch", check_nothing)
    source = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    assert source.count(old) >= 1, "the template has changed"
    broken = source.replace(old, new_text)
    if case == "a batch of chance":
        broken = broken.replace("np.arange(rows.tokens.shape[1]))", "np.arange(rows.tokens.shape[1])), axis=1)")
    file = tmp_path / "mine.py"
    file.write_text(broken, encoding="utf-8")
    failed = (str(result) for result in contract.check_plugin(str(file), train=False) if result.status == "failed")
    assert any(re.search(message, text) for text in failed)


@pytest.mark.parametrize("kind", at_night(SINGULAR, always=["schedule", "tokenizer"]))
def test_a_new_plugin_passes_every_check(kind: str, tmp_path: Path) -> None:
    plugin, test = new("my_own", kind, tmp_path)
    assert "xample" not in plugin.read_text(encoding="utf-8") + test.read_text(encoding="utf-8")
    results = list(contract.check_plugin(str(plugin), train=False))
    assert [str(result) for result in results if result.status not in ("passed", "skipped")] == []
    assert any(str(result).startswith(f"{kind} my_own") for result in results)


@pytest.mark.nightly
def test_a_run_that_does_not_resume_exactly_fails(tmp_path: Path) -> None:
    """Only a whole run shows this: an optimizer that keeps its state outside its state_dict."""
    source = (TEMPLATES / "optimizer.py").read_text(encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text(
        source.replace(
            "        return torch",
            "        class Slowing(torch.optim.SGD):\n            taken = 0\n\n"
            "            def step(self, closure=None):\n                self.taken += 1\n"
            "                for group in self.param_groups:\n                    group['momentum'] = 1 / (1 + self.taken)\n"
            "                return super().step(closure)\n\n        return torch",
        ).replace("torch.optim.SGD(trainable", "Slowing(trainable"),
        encoding="utf-8",
    )
    failed = contract.problems(file)
    assert any("after load_state_dict its steps differ" in text for text in failed)
    assert any("stopped and resumed differs from one that was not" in text for text in failed)


def test_check_exits_with_2_if_a_check_fails_and_prints_the_interface(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    source = (TEMPLATES / "schedule.py").read_text(encoding="utf-8")
    good.write_text(source, encoding="utf-8")
    bad.write_text(source.replace('"example"', '"other"').replace("return (step + 1)", "return -1 *"), encoding="utf-8")
    for file, status, text in ((good, 0, "10 passed, 0 failed"), (bad, 2, "FAILED")):
        done = CliRunner().invoke(build_app(), ["plugins", "check", str(file), "--no-train"])
        assert done.exit_code == status, done.output
        assert f"plugin interface {INTERFACE}, terakoya" in done.output and text in done.output


def test_new_refuses_bad_names_and_existing_files(tmp_path: Path) -> None:
    for name, kind, message in (
        ("My-Model", "architecture", "expected lower-case letters, digits and _"),
        ("class", "architecture", "expected lower-case letters"),
        ("mine", "architectur", 'there is no such kind; did you mean "architecture"'),
        ("bert", "architecture", "architecture bert: exists already"),
    ):
        with pytest.raises(UserError, match=message):
            new(name, kind, tmp_path)
    new("mine", "schedule", tmp_path)
    with pytest.raises(UserError, match=r"mine\.py: exists already"):
        new("mine", "tracker", tmp_path)


def test_an_architecture_learns_tokens_before_it_compares_examples() -> None:
    assert [each["objectives"] for each in training.find_partners("architectures", "bert")][-1] == "contrastive"
