import subprocess
import sys
from pathlib import Path


def write_pairs(path: Path, pairs: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{h}\t{r}\n" for h, r in pairs))
    return path


def external_chrf(pairs: list, path: Path) -> float:
    """Scores one rank's sentences with the group's scorer."""
    write_pairs(path, pairs)
    scorer = subprocess.Popen([sys.executable, "tools/chrf_report.py", str(path)], stdout=subprocess.PIPE, text=True)
    if scorer.wait() != 0:  # <- here
        raise RuntimeError(f"the scorer failed on {path}")
    return float(scorer.stdout.read().splitlines()[-1].split("\t")[1])
