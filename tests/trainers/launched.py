"""``scenario.py`` as launchers and schedulers start it: on several hosts, in namespaces, again, or from a notebook.

What it is to be is in the environment, as such programs have it: ``NODES``, ``ONCE``, ``NAMESPACE``, ``LINK``.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import lightning as L
import scenario
from lightning.fabric.plugins.environments import KubeflowEnvironment
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP

# From <linux/sched.h>.
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000


def move_to(namespace: str, host: str) -> None:
    """This process becomes one of another host: with its network, and its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as network:
        if libc.setns(network.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)


def cut_off() -> None:
    subprocess.run(["ip", "link", "set", os.environ["LINK"], "down"], check=True)


def raise_once() -> None:
    """In the first start only."""
    with suppress(FileExistsError):
        Path(os.environ["ONCE"]).touch(exist_ok=False)
        scenario.raise_error()


def train_in_a_notebook(root_dir: Path) -> None:
    """Twice in one process, where Lightning takes it for an interactive one."""
    from lightning.pytorch.trainer.connectors import accelerator_connector

    accelerator_connector._IS_INTERACTIVE = True
    sys.argv[1:] = ["raise", f"--root-dir={root_dir}"]
    options = scenario.parse_options()
    for deed in ("raise", "nothing"):
        options.deed = deed
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            default_root_dir=root_dir,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            strategy=SafeDDP(start_method="fork", suspect_after=2),
        )
        try:
            trainer.fit(scenario.Scenario(options), DataLoader(scenario.Numbers(), batch_size=4))
        except Exception as error:
            print(f"the cell has raised {type(error).__name__}", flush=True)
    print(f"left behind: {[thread.name for thread in threading.enumerate()]}", flush=True)


def main() -> None:
    if sys.argv[1] == "notebook":
        train_in_a_notebook(Path(sys.argv[2]))
        return
    if namespace := os.environ.get("NAMESPACE"):
        host = Path(namespace).name
        move_to(namespace, host)
        sys.argv = [f"{argument}/{host}" if "root-dir" in argument else argument for argument in sys.argv]
    scenario.DEEDS |= {"cut": cut_off, "raise-once": raise_once}
    # Lightning takes its variables for those of no scheduler, unless it is told.
    plugins = [KubeflowEnvironment()] if "KUBERNETES_PORT" in os.environ else None
    scenario.L.Trainer = partial(L.Trainer, num_nodes=int(os.environ.get("NODES", 1)), plugins=plugins)
    scenario.main()


if __name__ == "__main__":
    main()
