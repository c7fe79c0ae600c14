"""What the hangs share: their options, and the training of examples/digits.py."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from lightning_ncclsafe import SafeDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from digits import DigitsClassifier, DigitsData, train

__all__ = ["DigitsClassifier", "DigitsData", "argument_parser", "parse_options", "run"]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every hang understands."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["safe", "ddp"], default="safe", help="ddp: as Lightning comes")
    parser.add_argument("--start-method", choices=["popen", "spawn", "fork"], default="popen")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=12, help="hard limit, seconds (default: %(default)s)")
    parser.add_argument("--suspect-after", type=float, default=4, help="when SafeDDP looks, seconds (default: 4)")
    parser.add_argument("--stall", type=float, default=60, help="how long the rank stalls, seconds (default: 60)")
    parser.add_argument("--root-dir", type=Path, default=Path("runs/hangs"))
    return parser


def parse_options(description: str | None) -> argparse.Namespace:
    """Read the options that every hang understands."""
    return argument_parser(description).parse_args()


def run(
    model: L.LightningModule, data: L.LightningDataModule, options: argparse.Namespace, **trainer_args: Any
) -> None:
    """Train as examples/digits.py does, with the timeouts of the command line."""
    limits: dict[str, Any] = {"timeout": timedelta(seconds=options.timeout), "start_method": options.start_method}
    strategy: DDPStrategy
    if options.strategy == "ddp":
        strategy = DDPStrategy(**limits)
    else:
        strategy = SafeDDP(
            suspect_after=options.suspect_after,
            on_timeout="abort",
            report_dir=options.root_dir / "ncclsafe",
            **limits,
        )
    train(
        model,
        data,
        strategy,
        devices=options.devices,
        root_dir=options.root_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **trainer_args},
    )
