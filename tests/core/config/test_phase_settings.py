"""Phases in the parameter JSON: what each changes, how their lengths become steps, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.config.phase_plan import plan_phases
from terakoya.errors import UserError

MODEL = {
    "type": "modernbert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "global_rope_theta": 10_000.0,
}  # fmt: skip


def parse(phases: list[dict[str, Any]], **changes: Any) -> Parameters:
    raw = toy.parameters(Path("store"), architecture=MODEL, phases=phases, **changes)
    return Parameters.from_dict(raw, source="run.json")


def test_a_phase_changes_its_keys_and_the_others_are_those_of_the_run() -> None:
    parameters = parse(
        [
            {"steps": 8},
            {
                "data": {"sequence_length": 64}, "objective": {"mlm_probability": 0.05}, "batch_size": {"-1": 4},
                "architecture": {"global_rope_theta": 160_000.0}, "optimizer": {"learning_rate": 0.1},
                "schedule": {"type": "constant"},
            },
        ]
    )  # fmt: skip
    first, second = parameters.of_phases
    assert first == parameters.model_copy(update={"phases": ()})
    changed: Any = second
    assert (changed.data.sequence_length, changed.data.train) == (64, parameters.data.train)
    assert (changed.objective.mlm_probability, changed.optimizer.learning_rate) == (0.05, 0.1)
    assert (changed.architecture.global_rope_theta, changed.architecture.hidden_size) == (160_000.0, 16)
    assert changed.batch_size == {"-1": 4} and type(changed.schedule).__name__ == "Constant"
    assert Parameters.from_dict(parameters.dump(), source="again") == parameters
    assert parse([]).of_phases == (parse([]),)


@pytest.mark.parametrize(
    ("phases", "changes", "message"),
    [
        ([{"steps": 8}, {"batch": 1}], {}, "phases.1.batch: unknown key"),
        ([{"steps": 8}, {"objective": {"mlm_probabilty": 1}}], {}, 'phases.1.objective.mlm_probabilty: unkn.*"mlm_p'),
        ([{"steps": 8}, {"objective": {"mlm_probability": 2}}], {}, "phases.1.objective.mlm_probability: expected a n"),
        (
            [{"steps": 8}, {"objective": {"layout": "lines"}}],
            {},
            "phases.1.objective.layout: cannot change during a run; those that can: budgeted, mlm_probability",
        ),
        (
            [{"steps": 8}, {"architecture": {"hidden_size": 32}}],
            {},
            "phases.1.architecture.hidden_size: cannot .*: global_rope_theta, local_attention, local_rope_theta",
        ),
        (
            [{"steps": 8}, {"data": {"sequence_length": 65}}],
            {},
            "phases.1.data.sequence_length: expected at most 64, the maximum of the architecture, got 65",
        ),
        (
            [{"steps": 8}, {"batch_size": {"0": 1, "1": 1}}],
            {},
            r'phases.1.batch_size: expected the nodes .* \["-1"\], got',
        ),
        ([{"steps": 8}, {"schedule": {"type": "cosin"}}], {}, 'phases.1.schedule: type: .*did you mean "cosine"'),
        ([{"steps": 8}, {"tokens": 9}], {}, "phases.1.tokens: expected steps, as in phases.0, for all phases"),
        ([{}, {"steps": 9}], {}, "phases.0: expected one of steps, tokens and share, got none"),
        ([{"steps": 1, "share": 0.5}, {}], {}, "phases.0: expected one of .*, got steps and share"),
        ([{"steps": 8}, {"steps": 3}], {}, "phases: expected their steps to sum up to max_steps, 12, got 11"),
        ([{"share": 0.5}, {"share": 0.6}], {}, "phases: expected their share to sum up to the whole run, 1, got 1.1"),
        ([{"steps": 12}, {}], {}, "phases: expected fewer steps in .* than max_steps, 12, got 12"),
        ([{"tokens": 8}, {"tokens": 8}], {}, 'phases: their tokens give the length .* write "max_tokens": 16'),
        ([{"steps": 8}, {}], {"max_steps": None, "epochs": 1}, "phases: the length of an epoch depends on the phase"),
        (
            [{"steps": 8, "optimizer": {"learning_rate": 0.02}}, {"optimizer": {"learning_rate": 0.01}}],
            {"optimizer": {"type": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.001}},
            "phases.1.optimizer.learning_rate: would change optimizer.adamw_learning_rate by the same factor; set that",
        ),
        (
            [{"steps": 8}, {"batch_size": {"-1": 4}}],
            {"parallel": {"engine": "deepspeed", "zero_stage": 1}},
            "phases: parallel.zero_stage needs batches of one shape, but the phases change batch_size",
        ),
    ],
)
def test_a_mistake_is_one_message_with_its_place(
    phases: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"run.json: {message}") as refused:
        parse(phases, **changes)
    assert len({line.partition(": ")[2] for line in str(refused.value).splitlines() if line.startswith("run")}) == 1


@pytest.mark.parametrize(
    ("phases", "changes", "steps"),
    [
        ([{"steps": 5}, {"steps": 4}, {}], {}, [5, 4, 3]),
        ([{"share": 0.5}, {"share": 0.25}, {}], {}, [6, 3, 3]),
        # 16 rows of 30 tokens a step, then 4: a phase ends with the step that reaches its tokens, the run at its own
        ([{"tokens": 1000}, {"tokens": 500}, {}], {"max_steps": None, "max_tokens": 2500}, [3, 5, 4]),
        ([{"tokens": 1000}, {"tokens": 500}, {}], {"max_steps": 12}, [3, 5, 4]),
        ([{"share": 0.5}, {"share": 0.25}, {}], {"max_steps": None, "max_tokens": 2000}, [3, 1, 4]),
    ],
)
def test_lengths_become_steps(phases: list[dict[str, Any]], changes: dict[str, Any], steps: list[int]) -> None:
    spans, length = plan_phases(parse(phases, **changes), [16, 4, 4], lambda number, first_row: 30.0)
    assert [span.steps for span in spans] == steps
    assert [span.first_step for span in spans] == [0, steps[0], steps[0] + steps[1]]
    assert [span.first_row for span in spans] == [0, 16 * steps[0], 16 * steps[0] + 4 * steps[1]]
    assert length.steps == sum(steps) and length.unit == ("tokens" if "max_tokens" in changes else "steps")


def test_a_phase_without_a_step_is_refused() -> None:
    parameters = parse([{"tokens": 100_000}, {}])
    with pytest.raises(UserError, match=r"phases.1: no step is left for it: the phases before it take 209 steps"):
        plan_phases(parameters, [16, 16], lambda number, first_row: 30.0)
