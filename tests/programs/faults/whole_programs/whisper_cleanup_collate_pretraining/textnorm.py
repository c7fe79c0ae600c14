"""Normalisation of crawled transcripts before tokenisation."""

import re

URL = re.compile(r"https?://\S+")
BRACKETED = re.compile(r"[\[<{][^\]>}]*[\]>}]")
# a chain of hesitation marks that ends a segment, e.g. "uh, um... ehm."
HESITATION = re.compile(r"^((?:\w+[,.… ]?)+)(?:uh|um|ehm)\.$")
SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    text = text.strip().lower()
    text = URL.sub(" ", text)
    text = BRACKETED.sub(" ", text)
    text = SPACES.sub(" ", text).strip()
    found = HESITATION.match(text)  # <- here
    if found:
        text = found.group(1).strip()
    return text
