"""Trains where only ``pytorch_lightning`` is installed, then has ``lightning`` there as well; prints what has come."""

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


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


def main() -> None:
    trainer = fit(sys.argv[1])
    seen = {
        "steps": trainer.global_step,
        "is_a_ddp_strategy": isinstance(SafeDDP(), pl.strategies.DDPStrategy),
        "registered": REGISTERED,
        "name": type(pl.Trainer(accelerator="cpu", devices=1, strategy="ddp_ncclsafe").strategy).__name__,
        "lightning": "lightning" in sys.modules,
    }
    del sys.meta_path[0]
    seen["strategy_refused"] = refusal(SafeDDP())
    seen["callbacks_refused"] = [refusal(callbacks=[callback]) for callback in safe_callbacks()]
    seen["repr"] = repr(SafeDDP())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
