"""One rank of a case: ``python fault_rank.py MODULE CASE FOLDER STRATEGY SUSPECT_AFTER_S``."""

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from training import Here, quick_patience, rank_of_environment
from truths import all_cases

from lightning_ncclsafe.probes.process import traceback_signal


def main() -> None:
    module, name, folder, strategy_name, suspect_after_s = sys.argv[1:]
    # That of the scenario alone: all of them take longer to import than most take to go wrong.
    import_module(module)
    case = all_cases()[name]
    root = Path(folder)
    # What a rank that is killed leaves behind goes with the folder.
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    if host := os.environ.get("HOST"):
        # Only there: its calls that end a process would be found among the user's.
        from hosts import become_one_of, wait_for_witnesses

        become_one_of(host, root)
        wait_for_witnesses()
    # The import of the package does it; a fork of a program that had imported it before it was a rank has to.
    traceback_signal.arm_early()
    here = Here(case=case, rank=rank_of_environment(), folder=root, strategy_name=strategy_name)
    if not case.is_healthy:
        here = here.with_(suspect_after_s=float(suspect_after_s))
    else:
        here = here.with_(suspect_after_s=None, timeout_s=1800.0)
        if not case.scenario.real_time:
            quick_patience()
    layout = {"num_nodes": int(os.environ.get("NODES", 1)), "gpu_backend": os.environ.get("GPU_BACKEND", "")}
    case.scenario.run(here.with_(**layout, has_defaults="TRAINER_DEFAULTS" in os.environ))


if __name__ == "__main__":
    main()
