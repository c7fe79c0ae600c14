import subprocess
import sys
from pathlib import Path

import lightning as L

PLOT = "import json,sys,time\nrows=[json.loads(l) for l in open(sys.argv[1])]\ntime.sleep(7)\nprint(len(rows),'epochs')"


class EpochReport(L.Callback):
    """Rank 0 renders the report of the run so far with an external program at the end of every third epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / "report"
        folder.mkdir(exist_ok=True)
        with open(folder / "epochs.jsonl", "a") as f:
            f.write('{"epoch": %d}\n' % trainer.current_epoch)
        if trainer.current_epoch % 3 == 2:
            subprocess.run([sys.executable, "-c", PLOT, str(folder / "epochs.jsonl")], check=True)
