"""The launcher `example` meets the requirements of its kind, and starts the planned job."""

from pathlib import Path

from terakoya import plugins
from terakoya.components import Job
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_launcher() -> None:
    assert problems(PLUGIN) == []


def test_it_plans_first_and_starts_on_submit(tmp_path: Path) -> None:
    launcher = plugins.load([str(PLUGIN)]).component("launchers", "example")(threads=2)
    # `plugins new` replaces `train`, which would take longer: it writes a file into the job's folder
    job = Job("try", ("plugins", "new", "written", "--kind", "tracker"), tmp_path, tmp_path / "run", {"-1": 1})
    plan = launcher.plan(job, tmp_path)
    assert "OMP_NUM_THREADS=2" in plan.files["run.sh"]
    assert list(tmp_path.iterdir()) == []
    for name, text in plan.files.items():
        (tmp_path / name).write_text(text)
    assert launcher.submit(job, plan, tmp_path) == 0
    assert (tmp_path / "written.py").exists()
