"""The launcher `example` keeps its promises, and starts what it planned."""

from pathlib import Path

from terakoya import contract, plugins

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_keeps_what_a_launcher_promises() -> None:
    assert contract.problems(PLUGIN) == []


def test_it_plans_first_and_starts_when_told(tmp_path: Path) -> None:
    launcher = plugins.load([str(PLUGIN)]).component("launchers", "example")(threads=2)
    job = {"command": ["touch", str(tmp_path / "a file")]}
    assert "OMP_NUM_THREADS=2" in launcher.plan(job)["run.sh"]
    assert not (tmp_path / "a file").exists()
    assert list(launcher.submit(job)) == ["run.sh ended with 0"]
    assert (tmp_path / "a file").exists()
