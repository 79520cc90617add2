"""The tracker `example` meets the requirements of its kind, and writes the numbers that it receives."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_tracker() -> None:
    assert problems(PLUGIN) == []


def test_a_second_start_continues_the_same_file(tmp_path: Path) -> None:
    tracker = plugins.load([str(PLUGIN)]).component("trackers", "example")(digits=3)
    for step in (10, 20):
        opened = tracker.open(tmp_path, {"seed": 42})
        opened.log(step, {"loss": 2 / 3})
        opened.close()
    assert (tmp_path / "example.csv").read_text(encoding="utf-8") == "10,loss,0.667\n20,loss,0.667\n"
