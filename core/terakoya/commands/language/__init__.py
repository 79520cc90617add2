"""Messages and help in another language than English, from a catalogue: see docs/design/languages.md."""
