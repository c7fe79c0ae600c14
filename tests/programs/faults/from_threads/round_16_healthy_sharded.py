"""Round 16 after public threads: what users of sharded models do that looks odd, and of which nothing is to be said."""

import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT, Units
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, Here, Net, first_tensor, rows
from truths import Moment, healthy


class Mixed(IterableDataset[torch.Tensor]):
    """Batches with pictures and batches without, in the same order on all ranks."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in range(BATCHES):
            values = torch.full((BATCH_SIZE, 8), batch / 10 + self.here.rank / 100)
            values[:, 7] = float(batch % 2)
            yield values


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/PrimeIntellect-ai/prime-rl/pull/1959", strategies=SPLIT)
def encoder_that_all_ranks_leave_out_of_the_same_batches(here: Here) -> None:
    """The encoder runs in every other batch only, but on all ranks; one of them is long in decoding its pictures."""

    class Seeing(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

        def more(self) -> list[torch.nn.Module]:
            return [self.encoder]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = first_tensor(batch)
            if values[0, 7] > 0:
                time.sleep(0.7 * (self.global_rank == 2))
                values = self.encoder(values)
            return self.loss(values)

    here.fit(net=Seeing(here), data=DataLoader(Mixed(here), batch_size=None))


def shards_of(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """What this rank has of each weight."""
    weights: dict[str, Any] = dict(module.named_parameters())
    return {name: weight.detach().to_local() for name, weight in weights.items()}


class Averaging(L.Callback):
    """Averages the shards of the rank, and puts the averages in place of the weights for a few forward passes."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.shadow = {name: shard.clone() for name, shard in shards_of(module).items()}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, shard in shards_of(module).items():
            self.shadow[name].lerp_(shard, 0.1)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        kept = {name: shard.clone() for name, shard in shards_of(module).items()}
        self.put(module, self.shadow)
        for number in range(3):
            time.sleep(0.5 * (trainer.global_rank == number))
            module.layers(torch.ones(BATCH_SIZE, 8, device=module.device))
        self.put(module, kept)

    def put(self, module: L.LightningModule, values: dict[str, torch.Tensor]) -> None:
        for name, shard in shards_of(module).items():
            shard.copy_(values[name])


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/NCAR/miles-credit/issues/414", strategies=SPLIT)
def averages_of_shards_swapped_in_to_validate(here: Here) -> None:
    """All ranks swap averages of their shards in and out alike; each of them is slow in another forward pass."""
    here.fit(callbacks=[Averaging()])


@healthy({Moment.START: (3,)}, source="https://github.com/huggingface/trl/pull/6499", strategies=SPLIT)
def reference_scores_computed_by_all_before_training(here: Here) -> None:
    """All ranks run the model over as many batches before it is trained; each is slow in another of them."""

    class Preferring(Net):
        @torch.no_grad()
        def on_train_start(self) -> None:
            self.scores = []
            for batch in range(BATCHES):
                time.sleep(0.4 * (batch % here.world_size == self.global_rank))
                values = torch.full((BATCH_SIZE, 8), batch / 10, device=self.device)
                self.scores.append(self.layers(values).mean())

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.loss(batch) - self.scores[batch_idx]).square()

    here.fit(net=Preferring(here))


@healthy({Moment.START: (3,)}, source="https://github.com/saforem2/ezpz/pull/196", strategies=SPLIT)
def last_checkpoint_that_one_host_does_not_see(here: Here) -> None:
    """The host of the second rank still has an older list of checkpoints, but all ranks load what the first found."""
    folder = here.folder / "checkpoints"

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(folder / f"epoch-{trainer.current_epoch}")

    here.fit(callbacks=[Keeping()])
    dist.barrier()
    found = sorted(folder.glob("epoch-*"))
    newest = found[-2] if here.rank == 1 else found[-1]
    here.trainer(max_epochs=4).fit(Net(here), rows(here), ckpt_path=newest)


@healthy({Moment.END: (3,)}, source="https://github.com/huggingface/accelerate/pull/4206", strategies=SPLIT)
def adapter_gathered_by_all_and_merged_by_the_first(here: Here) -> None:
    """Only the last layer is trained; all ranks gather it in the end, and wait while the first merges and writes it."""

    class Tuned(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers[0].requires_grad_(False)

        def on_train_end(self) -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
            state = get_model_state_dict(self, options=options)
            if self.trainer.is_global_zero:
                time.sleep(2)
                torch.save(state, here.folder / "adapter.pt")
            dist.barrier()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.layers[2].parameters(), lr=0.001)

    here.fit(net=Tuned(here), max_epochs=1)
