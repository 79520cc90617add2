"""A check of what a phase of a run may change: a model that changes in the middle is as the phase describes it."""

from __future__ import annotations

import torch

from terakoya.training.model.changed_settings import change_settings
from terakoya_contract.architecture import ArchitectureCase
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_contract.toy import VOCABULARY

FACTOR = 4
"""How many times larger a base of rotary positions or a window is in the other phase."""


def check_phase_settings(case: ArchitectureCase) -> None:
    """A model that takes over its `phase_settings` in the middle of a run computes what a new one with them does."""
    names = sorted(type(case.architecture).phase_settings)
    if not names:
        raise CheckSkipped("phases change nothing of it")
    changed = {name: FACTOR * getattr(case.architecture, name) for name in names}
    other = case.architecture.model_copy(update=changed)
    model, reference = case.build(case.head), other.build(VOCABULARY, case.head).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0)  # else attention is nearly even, wherever tokens are
    reference.load_state_dict(model.state_dict())
    row = case.row(case.length())
    with torch.no_grad():
        before = case.architecture.hidden(model, row)
        change_settings(model, lambda: other.build(VOCABULARY, case.head))
        got, expected = case.architecture.hidden(model, row), other.hidden(reference, row)
    if not torch.equal(got, expected):
        difference = (got - expected).abs().max().item()
        raise CheckFailed(
            f"with other values of {', '.join(names)} a model in the middle of a run differs from a new one by "
            f"{difference:.1g}: only the base of rotary positions and the window of local attention can change there; "
            "leave out of phase_settings what else the model depends on"
        )
    if torch.equal(got, before):
        raise CheckFailed(f"phase_settings names {', '.join(names)}, but the hidden states do not depend on them")
