"""This process: its stacks and exceptions, what its interpreter and its children do, what its recorder has recorded."""
