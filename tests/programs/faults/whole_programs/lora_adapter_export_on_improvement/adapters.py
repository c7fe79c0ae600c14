"""LoRA layers and a text classifier that carries them."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, d_in: int, d_out: int, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = nn.Linear(d_in, d_out)
        self.lora_a = nn.Parameter(torch.randn(rank, d_in) * 0.02)
        self.lora_b = nn.Parameter(torch.zeros(d_out, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * self.scale


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = LoRALinear(width, 2 * width)
        self.down = LoRALinear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, vocab: int = 400, width: int = 64, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
