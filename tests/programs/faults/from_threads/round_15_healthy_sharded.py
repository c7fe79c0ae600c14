"""Round 15 after public threads: what users of sharded models do that looks odd, and of which nothing is to be said."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import SPLIT
from from_threads.round_14_sharded import Manual
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from training import Here, Net, first_tensor
from truths import Moment, healthy


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/pytorch/pytorch/issues/137129", strategies=SPLIT)
def units_kept_gathered_for_answers_of_unequal_length(here: Here) -> None:
    """All ranks gather the units and keep them; then each makes as many words as it needs, without any other rank."""

    class Answering(Net):
        @torch.no_grad()
        def answer(self, rows: torch.Tensor, words: int) -> None:
            units = [module for module in self.modules() if isinstance(module, FSDPModule)]
            for unit in units:
                unit.set_reshard_after_forward(False)
                unit.unshard()
            for _ in range(words):
                time.sleep(0.2)
                self.layers(rows)
            for unit in units:
                unit.set_reshard_after_forward(True)
                unit.reshard()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = first_tensor(batch)
            self.answer(rows, words=1 + 3 * ((self.global_rank + batch_idx) % 3))
            return self.loss(rows)

    here.fit(net=Answering(here), max_epochs=1)


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/NVIDIA/Megatron-LM/pull/5312", strategies=SPLIT)
def turns_filled_up_to_those_of_the_longest_talk(here: Here) -> None:
    """Talks have one to three turns; ranks agree upon the most, and fill up with turns that count nothing."""

    class Talking(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            rows = first_tensor(batch)
            turns = 1 + (self.global_rank * 2 + batch_idx) % 3
            most = torch.tensor(turns, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            for turn in range(int(most.item())):
                is_real = turn < turns
                time.sleep(0.3 * is_real)
                self.manual_backward(self.loss(rows) * is_real)
            optimizer.step()

    here.fit(net=Talking(here))


class Adapting(torch.optim.SGD):
    """Learns at a rate that follows from the gradients of all ranks, of which some have none."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        group = self.param_groups[0]
        shards = [weight.grad.to_local() for weight in group["params"]]
        size = torch.stack([shard.square().sum() for shard in shards]).sum()
        if not any(shard.numel() for shard in shards):
            print("no row of the last layer is on this rank", flush=True)
        dist.all_reduce(size)
        group["lr"] = 0.001 / (1 + size.item())
        return loss


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/microsoft/dion/pull/74", strategies=SPLIT)
def step_in_which_empty_shards_take_part(here: Here) -> None:
    """The last rank has no row of the only layer that is trained, and adds nothing to a sum; another rank is slow."""

    class Tuned(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.4 * (self.global_rank == 1))
            return self.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Adapting(self.layers[2].parameters(), lr=0.001)

    here.fit(net=Tuned(here))


@healthy({Moment.CHECKPOINT: (3,)}, source="https://github.com/bghira/SimpleTuner/pull/2902", strategies=SPLIT)
def export_that_fails_and_of_which_all_are_told(here: Here) -> None:
    """All ranks gather the weights; the first cannot write them, says so to the others, and all go on without."""

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(module, options=options)
            failed = torch.zeros((), device=module.device)
            if trainer.is_global_zero:
                time.sleep(1)
                try:
                    torch.save(state, here.folder / "missing" / "export.pt")
                except (OSError, RuntimeError) as error:
                    print(f"not exported: {error}", flush=True)
                    failed += 1
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if failed.item():
                print("going on without the export", flush=True)

    here.fit(callbacks=[Exporting()])
