"""The module that a run trains: how it is built, started from a folder, frozen, adapted."""
