"""The objective `example` keeps its promises, and hides about as many tokens as asked."""

from pathlib import Path

from terakoya import contract, plugins
from terakoya.contract import toy

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_keeps_what_an_objective_promises() -> None:
    assert contract.problems(PLUGIN) == []


def test_it_hides_the_share_it_is_told_to(tmp_path: Path) -> None:
    objective = plugins.load([str(PLUGIN)]).component("objectives", "example")(probability=0.5)
    rows = toy.make_rows(toy.make_store(tmp_path / "toy"), objective.row_layout(), count=30)
    batch = objective.collate(rows, toy.VOCABULARY)
    assert 0.35 < batch.counts["hidden"] / batch.counts["tokens"] < 0.55  # special tokens are never hidden
