"""What ranks have found on their hosts that will slow, starve or end the run: one cause per file."""
