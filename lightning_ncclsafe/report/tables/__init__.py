"""Text tables: of the ranks' data, of their hosts, and of timed collectives."""
