"""Round 4 of trainings of public threads that look odd and of which nothing is to be said."""

import signal
import subprocess
import sys
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from samples import Stream
from threads import on_split_model, quiet
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from training import BATCH_SIZE, BATCHES, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment


@quiet("https://github.com/pytorch/pytorch/pull/73903", world_size=3, moment=Moment.EPOCH_END)
def whole_state_collected_by_all_and_saved_by_one(here: Here) -> None:
    """All ranks collect the whole state of a split model, which rank 0 then writes for a second."""

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
            if trainer.is_global_zero:
                torch.save(state, here.folder / "weights.pt")
                time.sleep(1.0)

    on_split_model(here).fit(callbacks=[Exporting()])


@quiet("https://github.com/facebookresearch/fairscale/pull/694", world_size=3)
def layer_recomputed_on_all_ranks(here: Here) -> None:
    """A layer that measures over all ranks does so once more in the backward pass, in which it is recomputed."""

    class Recomputing(Net):
        def spread(self, values: torch.Tensor) -> torch.Tensor:
            spread = values.detach().square().mean(0)
            dist.all_reduce(spread)
            return values / (1 + spread)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hidden = self.layers[0](first_tensor(batch))
            return self.layers[2](checkpoint(self.spread, hidden, use_reentrant=False)).square().mean()

    here.fit(net=Recomputing(here))


@quiet("https://github.com/LibreYOLO/libreyolo/pull/594", world_size=3, moment=Moment.START)
def main_process_first_that_keeps_its_word(here: Here) -> None:
    """Rank 0 downloads for a second, fails, and lets the others go all the same; they find nothing, and go on."""

    class Prepared(Net):
        def setup(self, stage: str) -> None:
            try:
                if here.rank == 0:
                    time.sleep(1.0)
                    raise ConnectionError("the hub is offline")
            except ConnectionError as error:
                print(f"{error}, going on with the local copy", flush=True)
            finally:
                dist.barrier()

    here.fit(net=Prepared(here))


@quiet("https://github.com/seung-lab/neuroglancer/pull/165", moment=Moment.VALIDATION)
def program_left_to_run_beside_the_training(here: Here) -> None:
    """Rank 0 starts a program after each validation, does not wait for it, and collects it a validation later."""

    class Reporting(MeetingNet):
        program: Any = None

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                if self.program:
                    self.program.wait()
                self.program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])

    here.fit(net=Reporting(here), data=(rows(here), rows(here, batches=2)), max_epochs=3)


@quiet("https://github.com/webdataset/webdataset/issues/444")
def two_streams_of_unequal_length_side_by_side(here: Here) -> None:
    """The shorter of two streams starts again until the longer one ends, which are equally long on all ranks."""
    loaders = {
        "images": DataLoader(Stream(BATCHES), batch_size=BATCH_SIZE, num_workers=1),
        "texts": DataLoader(Stream(2), batch_size=BATCH_SIZE),
    }

    class Paired(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["images"] + batch["texts"])

    here.fit(net=Paired(here), data=CombinedLoader(loaders, mode="max_size_cycle"))


@quiet("https://github.com/ROCm/rccl/issues/429", world_size=3)
def tokens_exchanged_in_unequal_shares(here: Here) -> None:
    """Each step sends each rank another number of tokens, of which it is told before."""

    class Experts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            sent = [(here.rank + other + batch_idx) % 3 for other in range(here.world_size)]
            received = [(other + here.rank + batch_idx) % 3 for other in range(here.world_size)]
            tokens, found = torch.rand(sum(sent), 8), torch.empty(sum(received), 8)
            dist.all_to_all_single(found, tokens, received, sent)
            return self.loss(batch) + 0.0 * found.sum()

    here.fit(net=Experts(here))


@quiet("https://github.com/Lightning-AI/pytorch-lightning/issues/13162", world_size=3, moment=Moment.VALIDATION)
def score_that_all_ranks_log_in_every_other_validation(here: Here) -> None:
    """EarlyStopping is not strict, and does without a score in every other validation, on all ranks."""

    class Scored(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.current_epoch % 2:
                self.log("f1", torch.tensor(0.5), sync_dist=True)

    stopping = EarlyStopping("f1", strict=False, mode="max", patience=5)
    here.fit(net=Scored(here), data=(rows(here), rows(here, batches=2)), callbacks=[stopping], max_epochs=4)


@quiet("https://github.com/xapi-project/sm/pull/580", world_size=3)
def alarm_that_rings_now_and_then(here: Here) -> None:
    """An alarm bounds some work in each step, rings on one rank or the other, is caught, and switched off."""

    def give_up(signum: int, frame: Any) -> None:
        raise TimeoutError("the formula takes too long")

    class Rewarded(Net):
        def reward(self, takes_s: float) -> float:
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                time.sleep(takes_s)
                return 1.0
            except TimeoutError:
                return 0.0
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.reward(5.0 if (batch_idx + here.rank) % 3 == 0 else 0.01)
            return self.loss(batch)

    here.fit(net=Rewarded(here))
