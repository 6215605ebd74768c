"""Readers of text: prepared text with masked tokens, SQuAD, Python's language reference."""
