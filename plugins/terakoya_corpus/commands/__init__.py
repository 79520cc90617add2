"""The verbs below `terakoya corpus`."""
