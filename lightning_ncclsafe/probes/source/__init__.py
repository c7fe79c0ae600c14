"""The user's source: its functions, and what decides whether a line of it is reached. It is parsed, never executed."""
