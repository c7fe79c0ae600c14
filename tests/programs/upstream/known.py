"""Tests of Lightning that pass with its own classes alone, and why that is right: by a pattern of their names."""

KNOWN: dict[str, str] = {}
