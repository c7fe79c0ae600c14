"""Keyword spotting on filter banks."""

ACCENTS = ("american", "british", "indian", "scottish")
