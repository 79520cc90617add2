"""The command line, called in this process."""

from __future__ import annotations

import pytest

from terakoya.commands.main import main


def exit_code(*words: object) -> int:
    """The exit code of `terakoya WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in words])
    return int(ended.value.code or 0)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit code of `terakoya WORDS`, its output and its error output."""
    return exit_code(*words), *capsys.readouterr()


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error output of `terakoya WORDS`, which ends with 2."""
    capsys.readouterr()
    code, out, err = call(capsys, *words)
    assert code == 2 and "Traceback" not in out + err, out + err
    return err
