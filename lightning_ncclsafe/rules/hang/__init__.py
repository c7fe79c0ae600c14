"""Why a running job hangs: one cause per file."""
