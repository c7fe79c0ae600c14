"""LoRA on packed instructions with FSDP2; validation samples answers and scores them."""

import lightning as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel
from model import TinyGPT

PAD, BOS, EOS, SEP = 0, 1, 2, 3
CONTEXT = 96


def conversation(generator, longest):
    size = int(torch.randint(2, longest, (1,), generator=generator))
    question = torch.randint(4, 64, (size,), generator=generator)
    return question.tolist(), question.sort().values.tolist()


class PackedConversations(Dataset):
    """Fills every row up to the context with whole conversations; the loss covers answers only."""

    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(rows):
            ids, mask = [], []
            while True:
                question, answer = conversation(generator, 14)
                piece = [BOS, *question, SEP, *answer, EOS]
                if len(ids) + len(piece) > CONTEXT:
                    break
                ids += piece
                mask += [0] * (len(question) + 2) + [1] * (len(answer) + 1)
            fill = CONTEXT - len(ids)
            self.rows.append((torch.tensor(ids + [PAD] * fill), torch.tensor(mask + [0] * fill)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Prompts(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = [conversation(generator, 14) for _ in range(count)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def only_one(items):
    return items[0]


class InstructionTuning(L.LightningModule):
    def __init__(self, lr=3e-3, max_new_tokens=32, temperature=0.7):
        super().__init__()
        self.save_hyperparameters()
        self.model = TinyGPT(context=CONTEXT)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, batch_idx):
        ids, mask = batch
        logits = self.model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = mask[:, 1:].flatten().float()
        loss = (losses * weight).sum() / weight.sum().clamp(min=1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def answer(self, question):
        ids = torch.tensor([[BOS, *question, SEP]])
        for _ in range(self.hparams.max_new_tokens):
            weights = (self.model(ids)[:, -1] / self.hparams.temperature).softmax(-1)
            token = torch.multinomial(weights, 1)
            ids = torch.cat([ids, token], dim=1)
            if token.item() in (EOS, PAD):  # <- here
                break
        return ids[0, len(question) + 2 :].tolist()

    def validation_step(self, batch, batch_idx):
        question, wanted = batch
        given = self.answer(question)
        hits = sum(a == b for a, b in zip(given, wanted)) / len(wanted)
        self.log("val_token_accuracy", hits, batch_size=1, sync_dist=True)
        self.log("val_answer_length", float(len(given)), batch_size=1, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.hparams.lr)


def main():
    L.seed_everything(5)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=4,
        val_check_interval=30,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    trainer.fit(
        InstructionTuning(),
        DataLoader(PackedConversations(480, seed=1), batch_size=4, shuffle=True),
        DataLoader(Prompts(16, seed=2), batch_size=1, collate_fn=only_one),
    )


if __name__ == "__main__":
    main()
