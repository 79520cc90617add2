"""The command line: one thin file a verb."""

import sys

if sys.platform == "win32":
    sys.exit(
        "terakoya does not run on Windows itself. Install WSL 2 (in PowerShell: wsl --install), and install and run "
        "terakoya in its Linux: https://learn.microsoft.com/windows/wsl/install"
    )
