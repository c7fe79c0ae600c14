"""All scenarios: what is wrong, in files by theme, and what is not; and those from public issues, by round."""

from importlib import import_module
from pathlib import Path

from truths import all_cases

FOLDERS = ("scenarios", "from_threads")

for folder in FOLDERS:
    for path in sorted(Path(__file__).with_name(folder).glob("*.py")):
        import_module(f"{folder}.{path.stem}")

CASES = all_cases()
