"""The bundled corpus for ``terakoya demo``: short Japanese documents on many subjects, written for this project."""
