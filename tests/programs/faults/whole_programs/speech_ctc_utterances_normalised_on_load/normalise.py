"""Text normalisation of transcripts, bounded in time: some of them take very long."""

import re
import signal

NUMBERS = {
    "0": "zero",
    "1": "one",
    "2": "two",
    "3": "three",
    "4": "four",
    "5": "five",
    "6": "six",
    "7": "seven",
    "8": "eight",
    "9": "nine",
}
ALPHABET = " abcdefghijklmnopqrstuvwxyz'"


def spell_digits(text):
    return re.sub(r"\d", lambda match: " " + NUMBERS[match.group()] + " ", text)


def normalise(text, seconds=8):
    """Lower-case letters, apostrophes and single spaces only; "" for noise and silence."""
    signal.alarm(seconds)  # <- here
    text = text.strip().lower()
    if re.fullmatch(r"(\[[a-z]+\]\s*)*", text):
        return ""
    text = spell_digits(text)
    text = "".join(letter if letter in ALPHABET else " " for letter in text)
    text = re.sub(r" +", " ", text).strip()
    signal.alarm(0)
    return text


def encode(text):
    return [ALPHABET.index(letter) + 1 for letter in text]
