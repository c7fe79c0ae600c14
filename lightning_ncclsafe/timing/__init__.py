"""What the times of collectives mean: who was late, in which phase, what was transfer and what was waiting.

Pure functions over numbers that ranks have recorded; neither torch nor Lightning.
"""
