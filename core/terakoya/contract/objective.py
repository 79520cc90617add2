"""What an objective promises: batches that depend on rows and keys alone, and loss sums that add up.

Letters in shapes: B rows, T positions.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terakoya.components import Architecture, Batch, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.contract import settings, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention

TOLERANCE = 1e-4


class Subject(settings.Subject):
    """An objective, toy rows for it, and a module over an architecture that it takes."""

    @cached_property
    def objective(self) -> Objective:
        """At toy size."""
        found = self.settings()
        assert isinstance(found, Objective)
        return found

    @cached_property
    def layout(self) -> Layout:
        """How its rows are cut."""
        return self.objective.row_layout()

    @cached_property
    def rows(self) -> Rows:
        """Six rows."""
        with tempfile.TemporaryDirectory() as folder:
            return toy.make_rows(toy.store_for(self.layout, Path(folder) / "toy"), self.layout)

    def collate(self, rows: Rows) -> Batch:
        """The batch of `rows`. Raises Wrong for another type."""
        batch = self.objective.collate(rows, toy.VOCABULARY)
        if not isinstance(batch, Batch):
            raise Wrong(f"collate returned {type(batch).__name__}, expected terakoya.components.Batch")
        return batch

    @cached_property
    def architecture(self) -> Architecture:
        """The first registered architecture that the objective takes, at toy size."""
        reasons = []
        for name in registry().names("architectures"):
            architecture = toy.settings(registry().component("architectures", name))
            assert isinstance(architecture, Architecture)
            try:
                self.objective.build(architecture, toy.VOCABULARY)
            except UserError as error:
                reasons.append(str(error))
            else:
                return architecture
        raise Wrong("no installed architecture fits: " + "; ".join(reasons))

    @cached_property
    def module(self) -> nn.Module:
        """The root module, no dropout."""
        torch.manual_seed(3)
        module = self.objective.build(self.architecture, toy.VOCABULARY)
        if not isinstance(module, nn.Module):
            raise Wrong(f"build returned {type(module).__name__}, expected a torch.nn.Module")
        attention.use(module, "sdpa")
        return module.eval()

    def forward(self, rows: Rows) -> Mapping[str, Tensor]:
        """What the module returns for `rows`. Raises Wrong for anything but a mapping of tensors."""
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in self.collate(rows).arrays.items()}
        sums = self.module(tensors)
        if not isinstance(sums, Mapping) or not all(isinstance(each, Tensor) for each in sums.values()):
            raise Wrong(f"the module's forward returned {_shown(sums)}, expected a mapping of name to tensor")
        return sums


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({name: type(each).__name__ for name, each in value.items()})
    return type(value).__name__


def some(rows: Rows, where: slice) -> Rows:
    """A part of `rows`."""
    parts = {name: value[where] for name, value in vars(rows).items() if value is not None}
    return replace(rows, **parts)


def layout(subject: Subject) -> None:
    """It says how rows are cut."""
    if not isinstance(subject.layout, Layout):
        raise Wrong(f"row_layout returned {type(subject.layout).__name__}, expected terakoya.rows.row_source.Layout")


def terms(subject: Subject) -> None:
    """It names its losses, each with a weight and a count."""
    terms = subject.objective.terms()
    if not any(term.weight is not None for term in terms.values()):
        raise Wrong(
            f"terms names no loss: {sorted(terms) or 'nothing'}; give at least one a weight: "
            '{"my_loss": Term("masked", 1.0)}'
        )


def batch(subject: Subject) -> None:
    """A batch has what the loop needs, and counts what each term is divided by."""
    batch = subject.collate(subject.rows)
    shape = subject.rows.tokens.shape
    for name in ("input_ids", "document_ids", "position_ids"):
        array = batch.arrays.get(name)
        if array is None:
            raise Wrong(f"the batch has no {name}; rows have it")
        if array.shape != shape or array.dtype != np.int64:
            raise Wrong(f"{name} is {array.shape} {array.dtype}, expected {shape} int64")
    needed = {"tokens", *(term.count for term in subject.objective.terms().values())}
    missing = sorted(needed - set(batch.counts))
    if missing:
        raise Wrong(f"the batch does not count {', '.join(missing)}; it counts {', '.join(sorted(batch.counts))}")
    real = int(np.count_nonzero(subject.rows.document_ids >= 0))
    if batch.counts["tokens"] != real:
        raise Wrong(f"it counts {batch.counts['tokens']} tokens, the rows have {real} that are no padding")


def pure(subject: Subject) -> None:
    """A row's batch depends on the row and its key alone, never on a random generator or on its neighbours."""
    rows = subject.rows
    one, other = subject.collate(rows), subject.collate(rows)
    for name, array in one.arrays.items():
        if not np.array_equal(array, other.arrays[name]):
            raise Wrong(
                f"two batches of the same rows differ in {name}; draw from "
                "terakoya.toolkit.random_keys.draws(rows.keys, ...), never from a generator"
            )
    parts = [subject.collate(some(rows, slice(index, index + 1))) for index in range(len(rows))]
    inputs = np.concatenate([part.arrays["input_ids"] for part in parts])
    if not np.array_equal(inputs, one.arrays["input_ids"]):
        raise Wrong("a row's input_ids depend on which other rows are in the batch; draw by the row's key and position")
    for name, count in one.counts.items():
        total = sum(part.counts[name] for part in parts)
        if total != count:
            raise Wrong(f"the count {name} of a batch is {count}, but {total} over its rows one by one")


def losses(subject: Subject) -> None:
    """The module returns every term it named, as float32 sums, and no other."""
    named = subject.objective.terms()
    sums = subject.forward(subject.rows)
    missing = sorted(set(named) - set(sums))
    if missing:
        raise Wrong(f"no {', '.join(missing)} among what forward returned: {', '.join(sorted(sums)) or 'nothing'}")
    if set(sums) - set(named):
        raise Wrong(f"forward returned {', '.join(sorted(set(sums) - set(named)))}, which terms() does not name")
    for name, value in sums.items():
        bins = named[name].bins
        if value.dtype != torch.float32 or tuple(value.shape) != (() if bins is None else (bins,)):
            raise Wrong(
                f"{name} is {tuple(value.shape)} {value.dtype}, expected a float32 "
                f"{'scalar' if bins is None else f'vector of {bins}'}; sum it, do not average"
            )
        if not bool(torch.isfinite(value).all()):
            raise Wrong(f"{name} is {value.tolist()}, which is not finite")


def additive(subject: Subject) -> None:
    """Losses are sums: two halves of a batch add up to the whole."""
    half = len(subject.rows) // 2
    with torch.no_grad():
        whole, first, second = (
            subject.forward(some(subject.rows, where)) for where in (slice(None), slice(half), slice(half, None))
        )
    for name, term in subject.objective.terms().items():
        if term.weight is None:
            continue
        got, expected = (first[name] + second[name]).item(), whole[name].item()
        if abs(got - expected) > TOLERANCE * max(1.0, abs(expected)):
            raise Wrong(
                f"{name} of the whole is {expected:.6g}, of its halves together {got:.6g}; return the sum over what is "
                "counted, the loop divides by the count over all processes"
            )


def trains(subject: Subject) -> None:
    """Gradients of its losses reach the model, in training mode too."""
    module = subject.module
    module.train()
    try:
        sums = subject.forward(subject.rows)
    finally:
        module.eval()
    weights = {name: term.weight for name, term in subject.objective.terms().items() if term.weight is not None}
    missing = sorted(set(weights) - set(sums))
    if missing:
        raise Wrong(f"in training mode forward leaves out {', '.join(missing)}")
    torch.stack([weight * sums[name] for name, weight in weights.items()]).sum().backward()
    found = [each.grad for each in module.parameters() if each.grad is not None]
    module.zero_grad()
    if not found:
        raise Wrong("no gradient arrives at any weight")
    if not all(bool(torch.isfinite(each).all()) for each in found):
        raise Wrong("a gradient is not finite")


def exports(subject: Subject) -> None:
    """exports gives Transformers models, by sub-folder."""
    from transformers import PreTrainedModel

    models = subject.objective.exports(subject.module)
    if not isinstance(models, Mapping) or not models:
        raise Wrong(f'exports returned {models!r}, expected a mapping such as {{"": module.model}}')
    wrong = [name for name, model in models.items() if not isinstance(model, PreTrainedModel)]
    if wrong:
        raise Wrong(f"{wrong[0]!r} is a {type(models[wrong[0]]).__name__}, expected a transformers.PreTrainedModel")


def adopts(subject: Subject) -> None:
    """A run can start from the models that it exports."""
    modules = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        module = subject.objective.build(subject.architecture, toy.VOCABULARY)
        for weight in module.parameters():  # as training does it: nothing stays what it was
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
        modules.append(module)
    trained, fresh = modules
    models = {name: copy.deepcopy(model) for name, model in subject.objective.exports(trained).items()}
    expected = {
        name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()
    }
    try:
        subject.objective.adopt(fresh, models)
    except UserError as error:
        raise Wrong(f"adopt refuses what exports gave: {error}") from error
    for name, model in subject.objective.exports(fresh).items():
        got = model.state_dict()
        wrong = [key for key, value in expected[name].items() if not torch.allclose(got[key], value, atol=1e-6)]
        if wrong:
            raise Wrong(
                f"of {name or 'the model'}, {wrong[0]} is another after adopt than before exports; write adopt so that "
                "it undoes what exports computes"
            )


def no_empty_rows(subject: Subject) -> None:
    """A row without a real token counts nothing and keeps losses finite."""
    rows = some(subject.rows, slice(0, 1))
    empty = Rows(
        tokens=np.full_like(rows.tokens, toy.VOCABULARY.pad),
        document_ids=np.full_like(rows.document_ids, -1),
        position_ids=np.zeros_like(rows.position_ids),
        word_starts=None if rows.word_starts is None else np.zeros_like(rows.word_starts),
        keys=rows.keys,
        token_type_ids=None if rows.token_type_ids is None else np.zeros_like(rows.token_type_ids),
        next_sentence=None if rows.next_sentence is None else np.full_like(rows.next_sentence, -100),
        labels=None if rows.labels is None else np.full_like(rows.labels, -100),
    )
    if rows.next_sentence is not None:
        raise NotLookedAt("rows of pairs are never empty")
    if subject.collate(empty).counts["tokens"]:
        raise Wrong("a row of padding counts tokens; count where rows.document_ids >= 0")
    with torch.no_grad():
        sums = subject.forward(empty)
    broken = [name for name, value in sums.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise Wrong(f"{broken[0]} of a row of padding is {sums[broken[0]].tolist()}; a sum over nothing is 0")


CHECKS: tuple[Check, ...] = (
    layout, terms, batch, pure, losses, additive, no_empty_rows, trains, exports, adopts
)  # fmt: skip
