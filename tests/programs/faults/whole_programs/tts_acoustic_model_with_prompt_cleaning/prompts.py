"""Cleaning of prompts that crawlers delivered, before they become phonemes."""

import re

QUOTES = str.maketrans({"“": '"', "”": '"', "’": "'", "–": "-"})
ABBREVIATIONS = {"dr.": "doctor", "mr.": "mister", "st.": "street"}
ENUMERATION = re.compile(r"^(?:[a-z']+[ ,]?)+[.!?]$")  # <- here


def clean(text):
    text = text.translate(QUOTES).lower()
    for short, full in ABBREVIATIONS.items():
        text = text.replace(short, full)
    return re.sub(r"\s+", " ", text).strip()


def is_speakable(text):
    """Words separated by blanks or commas, and one mark at the end."""
    return ENUMERATION.match(text) is not None


def phonemes(text, size):
    return [1 + (ord(letter) * 7 + position % 3) % (size - 1) for position, letter in enumerate(text)]
