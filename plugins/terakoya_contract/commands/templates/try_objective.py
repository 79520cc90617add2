"""The objective `example` meets the requirements of its kind, and masks as many tokens as its setting says."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems, toy

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_an_objective() -> None:
    assert problems(PLUGIN) == []


def test_it_masks_the_share_that_the_setting_says(tmp_path: Path) -> None:
    objective = plugins.load([str(PLUGIN)]).component("objectives", "example")(probability=0.5)
    rows = toy.make_rows(toy.make_store(tmp_path / "toy"), objective.row_layout(), count=30)
    batch = objective.collate(rows, toy.VOCABULARY)
    assert 0.35 < batch.counts["hidden"] / batch.counts["tokens"] < 0.55  # special tokens are never masked
