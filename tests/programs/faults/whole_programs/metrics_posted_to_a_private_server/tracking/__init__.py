"""A small tracking service: one server, one Lightning logger."""
