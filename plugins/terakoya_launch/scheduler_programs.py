"""Calls of a scheduler's programs."""

from __future__ import annotations

import subprocess

from terakoya.errors import UserError


def run_program(where: str, *command: str, unless: str | None = None) -> str | None:
    """Runs a program of a scheduler and returns its output, or None if it fails with an error that contains `unless`.

    Raises:
        UserError: the program is not installed, or fails with another error; the message begins with `where`.
    """
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{where}: {command[0]} is not installed; run this command where jobs are submitted") from None
    if answer.returncode:
        if unless is not None and unless in answer.stderr:
            return None
        raise UserError(f"{where}: {command[0]}: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return answer.stdout
