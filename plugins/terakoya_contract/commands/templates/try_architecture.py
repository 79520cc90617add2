"""The architecture `example` meets the requirements of its kind, and has the size that its settings name."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems
from terakoya_contract.toy import VOCABULARY

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_an_architecture() -> None:
    assert problems(PLUGIN) == []


def test_it_has_as_many_layers_as_the_setting_says() -> None:
    architecture = plugins.load([str(PLUGIN)]).component("architectures", "example")(num_hidden_layers=3)
    assert len(architecture.blocks(architecture.build(VOCABULARY, "masked"))) == 3
