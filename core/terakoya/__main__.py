"""`python -m terakoya`."""

from terakoya.commands.main import main

main()
