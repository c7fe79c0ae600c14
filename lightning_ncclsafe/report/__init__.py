"""Findings in words and as data: the last rendering of a diagnosis, never a source of facts."""
