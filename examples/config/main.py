"""The digits again, trained from a config file: LightningCLI creates the Trainer, its strategy, callbacks and loggers.

python examples/config/main.py fit --config examples/config/ddp.yaml
python examples/config/main.py fit --config examples/config/ddp.yaml --trainer.strategy.phase_timeouts.init=60
python examples/config/main.py fit --config examples/config/ddp.yaml --print_config
"""

import sys
from pathlib import Path

from lightning.pytorch.cli import ArgsType, LightningCLI

sys.path.append(str(Path(__file__).parents[1]))

from digits import DigitsClassifier, DigitsData


def main(args: ArgsType = None, *, run: bool = True) -> LightningCLI:
    """Do what the arguments say; with ``run=False``, without the name of a method before them, only make the parts."""
    return LightningCLI(
        DigitsClassifier,
        DigitsData,
        args=args,
        run=run,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
