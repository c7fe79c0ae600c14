"""This process: its stacks, exceptions, children and environment, and what its Flight Recorder has recorded."""
