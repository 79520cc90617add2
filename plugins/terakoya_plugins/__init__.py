"""The plugins that come with terakoya: every module below is one plugin."""
