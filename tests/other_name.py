"""Trains where only ``pytorch_lightning`` is installed, then with both as well; prints what has come of it."""

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class NotInstalled:
    """A finder that says of ``lightning`` what Python says of a package that is not there."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec:
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None  # type: ignore[return-value]


sys.meta_path.insert(0, NotInstalled())  # type: ignore[arg-type]

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.demos.boring_classes import BoringModel  # noqa: E402
from pytorch_lightning.loggers import CSVLogger  # noqa: E402


def with_the_variable() -> list[str]:
    """The modules of our strategies in both registries, and what ours is, in a fork with both packages and it."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        del sys.meta_path[0]
        os.environ["NCCLSAFE_LIGHTNING"] = "pytorch_lightning"
        import lightning.pytorch

        import lightning_ncclsafe

        names = [
            one.strategies.StrategyRegistry["ddp_ncclsafe"]["strategy"].__module__ for one in (lightning.pytorch, pl)
        ]
        os.write(writer, json.dumps([*names, lightning_ncclsafe.SafeDDP.__module__]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return list(json.loads(told))


# Before ours is imported here.
WITH_THE_VARIABLE = with_the_variable()

import lightning_ncclsafe  # noqa: E402

REGISTERED = "ddp_ncclsafe" in pl.strategies.StrategyRegistry
SafeDDP, safe_callbacks = lightning_ncclsafe.SafeDDP, lightning_ncclsafe.safe_callbacks


def fit(folder: str) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        limit_val_batches=1,
        strategy=SafeDDP(report_dir=folder),
        callbacks=safe_callbacks(),
        logger=CSVLogger(folder),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return trainer


def refusal(strategy: object = "auto", callbacks: Sequence[object] = ()) -> str:
    """What a Trainer of ``lightning.pytorch`` says."""
    import lightning.pytorch
    from lightning.pytorch.demos.boring_classes import BoringModel

    try:
        lightning.pytorch.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, callbacks=list(callbacks), fast_dev_run=1
        ).fit(BoringModel())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def follow(package: str, folder: str) -> dict[str, Any]:
    """Trains with a Lightning and what is there for it of ours."""
    theirs = importlib.import_module(package)
    ours = importlib.import_module(f"lightning_ncclsafe.{package.partition('.')[0]}")
    demos = importlib.import_module(f"{package}.demos.boring_classes")

    class Logs(demos.BoringModel):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batch", float(batch_idx))
            return super().training_step(batch, batch_idx)

    logger = theirs.loggers.CSVLogger(folder, name=package)
    settings = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer = theirs.Trainer(
            max_steps=2,
            limit_val_batches=1,
            log_every_n_steps=1,
            strategy=ours.SafeDDP(report_dir=folder),
            callbacks=ours.safe_callbacks(),
            logger=logger,
            default_root_dir=folder,
            **settings,
        )
        trainer.fit(Logs())
    return {
        "steps": trainer.global_step,
        "said": [line[:26] for line in said.getvalue().splitlines() if "watching" in line or "failed" in line],
        "points": len(Path(logger.log_dir, "metrics.csv").read_text().splitlines()) - 1,
        "by_name": type(theirs.Trainer(strategy="ddp_ncclsafe", **settings).strategy).__name__,
    }


def main() -> None:
    trainer = fit(sys.argv[1])
    seen = {
        "with_the_variable": WITH_THE_VARIABLE,
        "steps": trainer.global_step,
        "tensorboard": "tensorboard" in sys.modules,
        "is_a_ddp_strategy": isinstance(SafeDDP(), pl.strategies.DDPStrategy),
        "registered": REGISTERED,
        "name": type(pl.Trainer(accelerator="cpu", devices=1, strategy="ddp_ncclsafe").strategy).__name__,
        "lightning": "lightning" in sys.modules,
    }
    del sys.meta_path[0]
    seen["strategy_refused"] = refusal(SafeDDP())
    seen["callbacks_refused"] = [refusal(callbacks=[callback]) for callback in safe_callbacks()]
    seen["repr"] = repr(SafeDDP())
    seen["followed"] = {name: follow(name, sys.argv[1]) for name in ("lightning.pytorch", "pytorch_lightning")}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
