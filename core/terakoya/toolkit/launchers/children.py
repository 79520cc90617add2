"""Programs that a launcher starts, and that end with it."""

from terakoya.process_pool import start_child as start_child
