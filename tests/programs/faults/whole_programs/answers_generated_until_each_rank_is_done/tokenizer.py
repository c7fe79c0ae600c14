"""A character tokenizer: enough for the toy dialogues, and it has no files to download."""

import string

PAD, START, END = 0, 1, 2
ALPHABET = string.ascii_lowercase + string.digits + " ?.,"
VOCABULARY = len(ALPHABET) + 3

_number = {character: index + 3 for index, character in enumerate(ALPHABET)}


def encode(text):
    return [_number[c] for c in text.lower() if c in _number]


def decode(tokens):
    return "".join(ALPHABET[t - 3] for t in tokens if t >= 3)
