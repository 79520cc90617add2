"""How processes find and talk to each other."""
