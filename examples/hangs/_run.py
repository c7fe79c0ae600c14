"""What the hangs share: their options, and the training of examples/digits.py."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from lightning_ncclsafe import SafeDDP, SafeModelParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from digits import DigitsClassifier, DigitsData, train

__all__ = ["DigitsClassifier", "DigitsData", "argument_parser", "parse_options", "run"]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every hang understands."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategy",
        choices=["safe", "ddp", "safe-model-parallel", "model-parallel"],
        default="safe",
        help="ddp and model-parallel: stock Lightning; model-parallel: the model is sharded by FSDP2",
    )
    parser.add_argument("--start-method", choices=["popen", "spawn", "fork"], default="popen")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=12, help="hard limit, seconds (default: %(default)s)")
    parser.add_argument("--suspect-after", type=float, default=4, help="when ranks are asked, seconds (default: 4)")
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
    train(
        model,
        data,
        strategy_of(options),
        devices=options.devices,
        root_dir=options.root_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **trainer_args},
    )


def strategy_of(options: argparse.Namespace) -> Strategy:
    """The strategy that the command line asks for, with its timeouts."""
    limits: dict[str, Any] = {"timeout": timedelta(seconds=options.timeout)}
    guard: dict[str, Any] = {"suspect_after": options.suspect_after, "report_dir": options.root_dir / "ncclsafe"}
    split: dict[str, Any] = {"data_parallel_size": options.devices, "tensor_parallel_size": 1}
    match options.strategy:
        case "ddp":
            return DDPStrategy(**limits, start_method=options.start_method)
        case "safe":
            return SafeDDP(**guard, **limits, start_method=options.start_method)
        case "model-parallel":
            return ModelParallelStrategy(**limits, **split)
        case _:
            return SafeModelParallel(**guard, **limits, **split)
