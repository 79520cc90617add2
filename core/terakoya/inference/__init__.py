"""Uses finished models: loads them, fills masks, finds replaced tokens, generates text."""
