"""Why ranks that present their data could not train together: one cause per file."""
