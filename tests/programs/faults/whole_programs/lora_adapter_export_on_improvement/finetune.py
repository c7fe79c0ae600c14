"""LoRA fine-tuning of a ticket classifier, sharded with FSDP2. Adapters are exported whenever validation improves."""

from pathlib import Path

import lightning as L
import torch
from adapters import Classifier
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

WORLD = 3
CLASSES = 4


class Tickets(Dataset):
    """Support tickets as bags of tokens. Part of the held-out ones come from a queue that was labelled by a rule."""

    def __init__(self, n: int, seed: int, held_out: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (n,), generator=g)
        topic = self.labels[:, None] * 100 + torch.randint(100, (n, 20), generator=g)
        noise = torch.randint(400, (n, 20), generator=g)
        self.tokens = torch.where(torch.rand(n, 20, generator=g) < 0.6, topic, noise)
        if held_out:
            by_rule = torch.arange(n) % 3 == 2
            self.labels = torch.where(by_rule, (self.labels + 1) % CLASSES, self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[i], self.labels[i]


class TicketModule(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(3)
        self.net = Classifier()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self.net(tokens), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        tokens, labels = batch
        logits = self.net(tokens)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class AdapterExport(L.Callback):
    """Writes the LoRA matrices (a few kilobytes) next to the logs, so that they can be served at once."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.best = float("inf")

    def gather(self, module: L.LightningModule) -> dict[str, torch.Tensor]:
        adapters = {}
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                adapters[name] = parameter.detach().full_tensor().clone()
        return adapters

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics["val_loss"])
        if score >= self.best:  # <- here
            return
        self.best = score
        adapters = self.gather(pl_module)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(adapters, self.folder / f"adapters-{trainer.global_step:05d}.pt")


def main() -> None:
    L.seed_everything(11)
    train = DataLoader(Tickets(360, seed=0, held_out=False), batch_size=10, shuffle=True)
    val = DataLoader(Tickets(180, seed=1, held_out=True), batch_size=20)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=SafeModelParallel(data_parallel_size=WORLD, tensor_parallel_size=1),
        max_epochs=10,
        callbacks=[AdapterExport("adapters")],
        log_every_n_steps=10,
    )
    trainer.fit(TicketModule(), train, val)


if __name__ == "__main__":
    main()
