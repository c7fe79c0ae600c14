"""python cli.py fit --config config.yaml"""

import time

import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from recognizer import FRAMES, MELS, CommandRecognizer, Commands


def seconds_per_step(model: CommandRecognizer, batch_size: int, trials: int = 5) -> float:
    """What a forward and a backward pass take here, in the mean of some trials."""
    features = torch.randn(batch_size, MELS, FRAMES)
    begin = time.perf_counter()
    for _ in range(trials):
        model(features).square().mean().backward()
    model.zero_grad(set_to_none=True)
    return (time.perf_counter() - begin) / trials


class CommandsCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--validate_every_seconds", type=float, default=60.0)

    def before_fit(self) -> None:
        wanted = self.config.fit.validate_every_seconds
        step_s = seconds_per_step(self.model, self.datamodule.batch_size)
        # the optimizer, logging and the loader take about as long as both passes
        interval = max(10, int(wanted / (2 * step_s)))
        self.trainer.val_check_interval = interval  # <- here
        print(f"a step takes {1000 * step_s:.1f} ms: validation after every {interval} batches")


if __name__ == "__main__":
    CommandsCLI(CommandRecognizer, Commands, save_config_kwargs={"overwrite": True})
