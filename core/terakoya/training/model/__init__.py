"""The module that is trained: built, started from a folder, frozen, adapted."""
