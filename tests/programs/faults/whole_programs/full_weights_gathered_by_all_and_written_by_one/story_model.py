import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class StoryModel(L.LightningModule):
    def __init__(self, vocabulary: int, width: int = 96, depth: int = 3, context: int = 48, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if hasattr(self, "embedding"):
            return
        h = self.hparams
        self.embedding = nn.Embedding(h.vocabulary, h.width)
        self.position = nn.Embedding(h.context, h.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(h.width, 4, 4 * h.width, dropout=0.0, batch_first=True) for _ in range(h.depth)
        )
        self.head = nn.Linear(h.width, h.vocabulary)
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def step(self, tokens):
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, batch_idx):
        loss = self.step(tokens)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens, batch_idx):
        self.log("val_loss", self.step(tokens), sync_dist=True, prog_bar=True)

    @torch.no_grad()
    def generate(self, prompts, new_tokens):
        """Always as many tokens: what follows the end of a story is cut off by the caller."""
        tokens = prompts
        for _ in range(new_tokens):
            scores = self(tokens[:, -self.hparams.context :])[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)], 1)
        return tokens

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
