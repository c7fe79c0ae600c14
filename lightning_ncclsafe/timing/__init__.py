"""Derives, from the times of collectives, which rank was late, in which phase, and what was transfer and what waiting.

Pure functions over numbers that ranks have recorded; imports neither torch nor Lightning.
"""
