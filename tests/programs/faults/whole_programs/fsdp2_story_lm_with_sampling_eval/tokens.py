"""Character tokenizer for the toy story corpus."""

import string

PAD, BOS, EOS = 0, 1, 2
_ALPHABET = string.ascii_lowercase + " .,"
STOI = {c: i + 3 for i, c in enumerate(_ALPHABET)}
ITOS = {i: c for c, i in STOI.items()}
VOCAB_SIZE = len(STOI) + 3


def encode(text):
    return [BOS] + [STOI[c] for c in text.lower() if c in STOI] + [EOS]


def decode(ids):
    return "".join(ITOS.get(int(i), "") for i in ids)
