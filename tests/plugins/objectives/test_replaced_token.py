"""Replaced-token detection against the paper, implemented with plain Transformers models."""

from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from packed_rows import VOCABULARY, rows, tensors
from pydantic import ValidationError
from torch import Tensor
from torch.func import functional_call
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from terakoya.components import Batch
from terakoya.components.rows import Rows
from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.random_keys import hash_u64, row_keys
from terakoya.training.loss import weighted_loss
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.electra import Electra
from terakoya_plugins.objectives.replaced_token import ReplacedToken
from terakoya_plugins.objectives.replaced_token.module import BINS, corrupt, discriminator_metrics, score_histogram

ELECTRA = Electra(
    embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
DOCUMENTS = [[9, 12], [20], [5, 6, 7], [24], [3, 18], [11]]
WORD = "electra.embeddings.word_embeddings.weight"


def select_rows(all_rows: Rows, chosen: list[int]) -> Rows:
    """The rows `chosen` of `all_rows`."""
    assert all_rows.word_starts is not None
    return Rows(
        tokens=all_rows.tokens[chosen], document_ids=all_rows.document_ids[chosen],
        position_ids=all_rows.position_ids[chosen], word_starts=all_rows.word_starts[chosen],
        keys=all_rows.keys[chosen],
    )  # fmt: skip


def build(objective: ReplacedToken, architecture: Electra = ELECTRA) -> Any:
    torch.manual_seed(0)
    module = objective.build(architecture, VOCABULARY)
    attention.use(module, "sdpa")
    for name, parameter in module.named_parameters():
        if "difference" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return module


def fixed_sample(odds: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Samples that no rounding can change; every fourth is correct."""
    drawn = 5 + (batch["sample_uniforms"] * 55).long()
    return torch.where(drawn % 4 == 0, batch["masked_labels"].clamp(min=0), drawn)


def losses_of_the_paper(
    batch: Batch, generator: ElectraForMaskedLM, discriminator: ElectraForPreTraining, extra: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Both mean losses with full logits over padded documents; `extra` are weights that replace the discriminator's."""
    arrays = batch.arrays
    ids, documents = arrays["input_ids"], arrays["document_ids"]
    labels = np.full(ids.size, -100)
    sampled = np.zeros(ids.size, np.int64)
    used = arrays["masked_labels"] >= 0
    labels[arrays["masked_positions"][used]] = arrays["masked_labels"][used]
    sampled[arrays["masked_positions"][used]] = fixed_sample(torch.zeros(0), tensors(batch)).numpy()[used]
    pieces = [
        np.flatnonzero((documents == number).ravel() & (np.arange(ids.size) // ids.shape[1] == row))
        for row in range(len(ids))
        for number in range(documents[row].max() + 1)
    ]
    longest = max(map(len, pieces))
    shape = (len(pieces), longest)
    x, y, s = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100), torch.zeros(shape, dtype=torch.long)
    present = torch.zeros(shape, dtype=torch.long)
    for number, positions in enumerate(pieces):
        for table, source in ((x, ids.ravel()), (y, labels), (s, sampled)):
            table[number, : len(positions)] = torch.from_numpy(source[positions])
        present[number, : len(positions)] = 1
    generator_loss = generator(x, attention_mask=present, labels=y).loss
    original = torch.where(y >= 0, y, x)
    corrupted = torch.where(y >= 0, s, x)
    replaced = (corrupted != original).long()
    assert 5 < replaced.sum() < (y >= 0).sum(), "some samples are correct"
    result = functional_call(discriminator, extra, (corrupted,), {"attention_mask": present, "labels": replaced})
    return generator_loss, result.loss


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Asserts that each gradient differs by at most 1e-5 of its norm, or of a thousandth of the largest norm."""
    assert ours.keys() == theirs.keys()
    largest = max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        error = float((ours[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3, 4], [5]]])
@pytest.mark.parametrize("sharing", ["tied", "none", "disentangled"])
def test_losses_and_gradients_equal_the_papers(sharing: Any, micro_batches: list[list[int]]) -> None:
    """Packed rows, also in uneven micro-batches, against padded documents with full logits."""
    objective = ReplacedToken(sharing=sharing, mlm_probability=0.3)
    module = build(objective)
    module.sample = fixed_sample
    everything = rows(DOCUMENTS)
    whole = objective.collate(everything, VOCABULARY)
    total = 0.0
    losses = {"generator_loss": 0.0, "discriminator_loss": 0.0}
    for chosen in micro_batches:
        sums = module(tensors(objective.collate(select_rows(everything, chosen), VOCABULARY)))
        loss = weighted_loss(sums, objective.terms(), whole.counts)
        loss.backward()
        total += loss.item()
        losses["generator_loss"] += sums["generator_loss"].item() / whole.counts["masked"]
        losses["discriminator_loss"] += sums["discriminator_loss"].item() / whole.counts["tokens"]

    generator = ElectraForMaskedLM(ELECTRA.scale_width(Fraction(1, 4)).config(VOCABULARY))
    generator.load_state_dict(module.generator.state_dict())
    discriminator = ElectraForPreTraining(ELECTRA.config(VOCABULARY))
    own = objective.exports(module)["discriminator"].state_dict()
    discriminator.load_state_dict(own)
    extra: dict[str, Tensor] = {}
    difference = torch.zeros(0)
    if sharing == "tied":
        discriminator.electra.embeddings = generator.electra.embeddings
    if sharing == "disentangled":
        shared = generator.electra.embeddings.word_embeddings.weight.detach()
        difference = (own[WORD] - shared).requires_grad_()
        extra = {WORD: shared + difference}
    generator_loss, discriminator_loss = losses_of_the_paper(whole, generator, discriminator, extra)
    (generator_loss + 50.0 * discriminator_loss).backward()
    assert total == pytest.approx(generator_loss.item() + 50.0 * discriminator_loss.item(), rel=1e-5)
    assert losses["generator_loss"] == pytest.approx(generator_loss.item(), rel=1e-5)
    assert losses["discriminator_loss"] == pytest.approx(discriminator_loss.item(), rel=1e-5)

    theirs = {f"generator.{name}": value.grad for name, value in generator.named_parameters()}
    for name, value in discriminator.named_parameters():
        if sharing == "tied" and "electra.embeddings." in name:
            continue
        if sharing == "disentangled" and name == WORD:
            theirs["discriminator.electra.embeddings.word_embeddings.difference.weight"] = difference.grad
            continue
        theirs[f"discriminator.{name}"] = value.grad
    for name, value in theirs.items():
        assert value is not None, name
    compare({name: value.grad for name, value in module.named_parameters()}, theirs)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("sharing", ["tied", "none", "disentangled"])
def test_shared_embeddings(sharing: Any) -> None:
    module = build(ReplacedToken(sharing=sharing))
    generator, discriminator = module.generator, module.discriminator
    assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight
    assert (discriminator.electra.embeddings is generator.electra.embeddings) == (sharing == "tied")
    generator.zero_grad()
    batch = tensors(ReplacedToken().collate(rows(DOCUMENTS), VOCABULARY))
    module(batch)["discriminator_loss"].backward()
    has_gradient = generator.electra.embeddings.word_embeddings.weight.grad is not None
    assert has_gradient == (sharing == "tied"), "only tied embeddings learn from the discriminator"
    assert generator.electra.encoder.layer[0].output.dense.weight.grad is None, "no gradient flows through samples"


def test_a_new_discriminator_has_the_generators_embeddings() -> None:
    torch.manual_seed(0)
    module = ReplacedToken(sharing="disentangled").build(ELECTRA, VOCABULARY)
    exported = ReplacedToken().exports(module)
    generator, discriminator = (exported[name].state_dict() for name in ("generator", "discriminator"))
    assert torch.equal(generator[WORD], discriminator[WORD])


def test_exports_of_disentangled_embeddings_have_the_sum() -> None:
    objective = ReplacedToken(sharing="disentangled")
    module = build(objective).eval()
    exported = objective.exports(module)["discriminator"]
    assert type(exported) is ElectraForPreTraining
    attention.release(exported)
    attention.use(module, "sdpa")
    ids = torch.randint(5, 60, (2, 12))
    batch = {
        "input_ids": ids, "document_ids": torch.zeros_like(ids), "position_ids": torch.arange(12).expand(2, 12)
    }  # fmt: skip
    with torch.no_grad():
        ours = ELECTRA.replaced_logits(module.discriminator, ELECTRA.hidden(module.discriminator, batch))
        theirs = exported(ids).logits
    assert (ours - theirs).abs().max() < 1e-5
    assert "difference" in dict(module.named_modules())["discriminator.electra.embeddings.word_embeddings"]._modules


def test_a_correct_sample_counts_as_original_and_unused_slots_write_nothing() -> None:
    input_ids = torch.tensor([[4, 11, 4, 13], [4, 21, 22, 23]])
    positions, labels = torch.tensor([0, 2, 4, 0, 0]), torch.tensor([10, 12, 20, -100, -100])
    ids, replaced = corrupt(input_ids, positions, labels, torch.tensor([10, 50, 51, 52, 53]))
    assert ids.tolist() == [[10, 11, 50, 13], [51, 21, 22, 23]]
    assert replaced.tolist() == [[False, False, True, False], [True, False, False, False]]


def sample_tokens(objective: ReplacedToken, module: Any, batch: Batch) -> dict[tuple[int, int], int]:
    """The sample for each masked position (row in the batch, column)."""
    samples: list[Tensor] = []
    original = type(module).sample
    module.sample = lambda odds, inner: samples.append(original(module, odds, inner)) or samples[-1]
    module(tensors(batch))
    del module.sample
    used = batch.arrays["masked_labels"] >= 0
    positions = np.divmod(batch.arrays["masked_positions"][used], batch.arrays["input_ids"].shape[1])
    return {(int(r), int(c)): int(t) for r, c, t in zip(*positions, samples[0].numpy()[used], strict=True)}


def test_samples_depend_on_row_and_position_alone() -> None:
    objective = ReplacedToken(mlm_probability=0.3)
    module = build(objective)
    everything = rows(DOCUMENTS)
    together = sample_tokens(objective, module, objective.collate(everything, VOCABULARY))
    for chosen in ([3], [5, 0, 3]):
        part = sample_tokens(objective, module, objective.collate(select_rows(everything, chosen), VOCABULARY))
        for (row, column), token in part.items():
            assert together[chosen[row], column] == token
    others = sample_tokens(objective, module, objective.collate(rows(DOCUMENTS, first_key=100), VOCABULARY))
    assert others != together, "other keys give other samples"


def test_the_random_numbers_are_hashes_of_row_and_position() -> None:
    """They are uniform over [0, 1) and never change: `hash_u64(seed, epoch, store, row, "sample", position)`."""
    batch = ReplacedToken(mlm_probability=0.4).collate(
        replace(rows([[24]] * 60), keys=row_keys(5, 1, 2, np.arange(60))), VOCABULARY
    )
    used = batch.arrays["masked_labels"] >= 0
    uniforms = batch.arrays["sample_uniforms"][used]
    for place, uniform in list(zip(batch.arrays["masked_positions"][used].tolist(), uniforms.tolist(), strict=True))[
        ::50
    ]:
        assert uniform == (hash_u64(5, 1, 2, place // 24, "sample", place % 24) >> 12) / 2.0**52
    assert 0.0 <= uniforms.min() < 0.02 and 0.98 < uniforms.max() < 1.0
    assert abs(uniforms.mean() - 0.5) < 4 * (len(uniforms) * 12) ** -0.5


def test_accuracies_count_used_slots_only() -> None:
    """A generator that always predicts token 0, the clamped label of unused slots, is never correct."""
    objective = ReplacedToken(mlm_probability=0.3)
    module = build(objective).eval()
    batch = objective.collate(rows(DOCUMENTS), VOCABULARY)
    assert batch.counts["masked"] < len(batch.arrays["masked_labels"])
    for token, correct in ((0, 0), (int(batch.arrays["masked_labels"][0]), None)):
        with torch.no_grad():
            module.generator.generator_lm_head.bias.zero_()[token] = 1e4
            sums = module(tensors(batch))
        expected = int((batch.arrays["masked_labels"] == token).sum())
        assert correct is None or expected == correct
        assert float(sums["generator_accuracy"]) == float(sums["sampled_accuracy"]) == expected


def test_a_low_temperature_sharpens_the_distribution() -> None:
    flat, sharp = (ReplacedToken(mlm_probability=0.3, temperature=t) for t in (100.0, 1e-5))
    batch = flat.collate(rows(DOCUMENTS), VOCABULARY)
    module = build(sharp)
    odds = torch.rand(len(batch.arrays["masked_labels"]), 60)
    assert torch.equal(module.sample(odds / odds.amax(1, keepdim=True), tensors(batch)), odds.argmax(1))
    assert len(build(flat).sample(odds, tensors(batch)).unique()) > 10


def test_the_vocabulary_head_runs_at_masked_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = ReplacedToken()
    module = build(objective)
    batch = objective.collate(rows([[20], [20]]), VOCABULARY)
    seen = []
    real = Electra.logits
    monkeypatch.setattr(
        Electra, "logits", lambda self, model, hidden: seen.append(hidden.shape) or real(self, model, hidden)
    )
    module(tensors(batch))
    assert seen == [(len(batch.arrays["masked_positions"]), 8)]


# ------------------------------------------------------------------------------------------------- metrics


def exact_auc(scores: np.ndarray, replaced: np.ndarray) -> float:
    """The share of (original, replaced) pairs in the right order, plus half of the equal pairs."""
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable") + 1.0
    _, inverse = np.unique(scores, return_inverse=True)
    mean = np.bincount(inverse, ranks) / np.bincount(inverse)
    hits = int(replaced.sum())
    return float((mean[inverse][replaced].sum() - hits * (hits + 1) / 2) / (hits * (len(scores) - hits)))


SCORES = {
    # mean, standard deviation, shift of the replaced tokens' scores, tolerance of the AUC
    "untrained": (0.0, 0.01, 0.002, 1e-3),
    "a step later": (-0.3, 0.1, 0.02, 5e-4),
    "only the base rate is learnt": (-1.75, 0.02, 0.01, 5e-4),
    "young": (-1.8, 0.2, 0.3, 1e-4),
    "trained": (-2.0, 1.0, 1.5, 1e-4),
    "well trained": (-6.0, 3.0, 9.0, 1e-4),
    "far out": (0.0, 12.0, 1.0, 1e-3),
}


@pytest.mark.parametrize(("mean", "spread", "shift", "tolerance"), SCORES.values(), ids=SCORES)
def test_metrics_equal_those_of_the_scores(mean: float, spread: float, shift: float, tolerance: float) -> None:
    """All metrics but the AUC, which is computed from bins, are exact."""
    draw = np.random.default_rng(0)
    replaced = draw.random(20_000) < 0.12
    scores = (draw.normal(mean, spread, 20_000) + shift * replaced).astype(np.float32)
    scores[:3] = 0.0, -1e-6, 1e-6
    real = draw.random(20_000) < 0.9
    centre = ReplacedToken()._centre()
    each = (torch.from_numpy(array)[None] for array in (scores, replaced, real))
    counts = score_histogram(*each, centre=centre).double().numpy()
    got = discriminator_metrics(counts, centre=centre)
    scores, replaced = scores[real], replaced[real]
    predicted = scores >= 0
    assert counts.sum() == real.sum()
    assert got["discriminator_accuracy"] == pytest.approx((predicted == replaced).mean())
    assert got["discriminator_precision"] == pytest.approx(replaced[predicted].mean())
    assert got["discriminator_recall"] == pytest.approx(predicted[replaced].mean())
    assert got["replaced_rate"] == pytest.approx(replaced.mean())
    assert abs(got["discriminator_auc"] - exact_auc(scores, replaced)) < tolerance


def test_metrics_with_a_denominator_of_0_are_left_out() -> None:
    assert discriminator_metrics(np.zeros(2 * BINS), centre=-1.7) == {}
    only_originals = np.zeros(2 * BINS)
    only_originals[10] = 5.0
    assert discriminator_metrics(only_originals, centre=-1.7) == {"discriminator_accuracy": 1.0, "replaced_rate": 0.0}
    no_number = score_histogram(
        torch.full((1, 3), float("nan")), torch.zeros(1, 3, dtype=torch.bool), torch.ones(1, 3), centre=-1.7
    )
    assert no_number.sum() == 3


# ----------------------------------------------------------------------------------------------------------- settings


def test_a_nested_generator_is_read_and_written_with_its_type() -> None:
    raw = {"generator": {"type": "electra", "embedding_size": 16, "hidden_size": 8, "num_attention_heads": 2}}
    objective = ReplacedToken.model_validate(raw)
    assert objective.generator == Electra(embedding_size=16, hidden_size=8, num_attention_heads=2)
    dumped = objective.model_dump(mode="json")
    assert dumped["generator"]["type"] == "electra" and ReplacedToken.model_validate(dumped) == objective
    for wrong, message in (
        ({"type": "electro"}, "electro: not installed; did you mean"),
        ({"hidden_size": 8}, 'expected an object with a "type"'),
        ({"type": "electra", "hiden_size": 8}, 'hiden_size: unknown key; did you mean "hidden_size"'),
    ):
        with pytest.raises(ValidationError, match=message):
            ReplacedToken.model_validate({"generator": wrong})


def test_a_bert_of_another_depth_as_generator() -> None:
    deep = Bert(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=32
    )
    objective = ReplacedToken(generator=deep, sharing="none")
    module = build(objective)
    sums = module(tensors(objective.collate(rows(DOCUMENTS), VOCABULARY)))
    sums["generator_loss"].backward()
    assert len(module.generator.bert.encoder.layer) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generator_size": "a/b"}, 'expected a fraction like "1/4", at most 1, got "a/b"'),
        ({"generator_size": "3/2"}, "at most 1"),
        ({"generator_size": "1/0"}, "expected a fraction"),
        ({"generator_size": "1/2", "generator": ELECTRA}, "exclude each other"),
        ({"replace_probability": 0.9, "random_probability": 0.2}, "add up to more than 1"),
        ({"temperature": 0.0}, "greater than 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplacedToken(**settings)


@pytest.mark.parametrize(
    ("settings", "architecture", "message"),
    [
        ({}, Bert(), "architecture Bert cannot be the discriminator: it has no head 'discriminator'"),
        ({"generator_size": "1/3"}, ELECTRA, "objective.generator_size: architecture Electra: 1/3 of hidden_size 32"),
        (
            {"generator": ELECTRA.model_copy(update={"embedding_size": 8})},
            ELECTRA,
            r"objective.sharing: embeddings cannot be shared: LayerNorm.bias is \(8,\) in ElectraForMaskedLM",
        ),
        (
            {"generator": ELECTRA.model_copy(update={"max_position_embeddings": 16}), "sharing": "none"},
            ELECTRA,
            "objective.generator: accepts rows of at most 16 tokens, the discriminator 32",
        ),
        (
            {"generator": ELECTRA.model_copy(update={"embedding_size": 8}), "sharing": "disentangled"},
            ELECTRA,
            "objective.sharing: word embeddings cannot be shared: their width is 8 in ElectraForMaskedLM, 16 in",
        ),
    ],
)
def test_incompatible_models_are_refused(settings: dict[str, Any], architecture: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReplacedToken(**settings).build(architecture, VOCABULARY)


def test_a_generator_without_document_masking_refuses_packed_rows() -> None:
    class Mixing(Electra):
        document_masking: ClassVar[Any] = "none"

    mixing = Mixing(**ELECTRA.scale_width(Fraction(1, 4)).model_dump())
    with pytest.raises(UserError, match="architecture Mixing cannot keep documents in one row apart"):
        ReplacedToken(generator=mixing).build(ELECTRA, VOCABULARY)
    assert ReplacedToken(generator=mixing, layout="lines").build(ELECTRA, VOCABULARY)
