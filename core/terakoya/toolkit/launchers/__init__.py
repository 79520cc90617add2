"""What the scripts of launchers share."""
