"""Documents of several corpora, packed into blocks of equal size."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

END_OF_TEXT = 0
# mean number of tokens of a document
LENGTHS = {"encyclopedia": 425, "books": 426, "chats": 310}


def documents(corpora: list[str], per_corpus: int, vocabulary: int, seed: int) -> Iterator[torch.Tensor]:
    """All documents, the corpora in turn."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(per_corpus):
        for corpus in corpora:
            length = LENGTHS[corpus] + int(torch.randint(-40, 40, (), generator=generator))
            start = int(torch.randint(1, vocabulary, (), generator=generator))
            step = int(torch.randint(1, 5, (), generator=generator))
            yield (start + step * torch.arange(length)) % (vocabulary - 1) + 1


class PackedDocuments(IterableDataset):
    def __init__(
        self, config: dict, block_size: int, vocabulary: int, rank: int, world_size: int, *, seed: int, endless
    ):
        self.config, self.block_size, self.vocabulary = config, block_size, vocabulary
        self.rank, self.world_size = rank, world_size
        self.seed, self.endless = seed, endless

    def _own_documents(self) -> Iterator[torch.Tensor]:
        epoch = 0
        while True:
            everything = documents(
                self.config["corpora"], self.config["documents_per_corpus"], self.vocabulary, self.seed + epoch
            )
            for number, document in enumerate(everything):
                if number % self.world_size == self.rank:  # <- here
                    yield document
            epoch += 1
            if not self.endless:
                return

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.empty(0, dtype=torch.long)
        separator = torch.tensor([END_OF_TEXT])
        for document in self._own_documents():
            buffer = torch.cat([buffer, document, separator])
            while len(buffer) > self.block_size:
                yield buffer[: self.block_size + 1].clone()
                buffer = buffer[self.block_size :]
        # what is left over does not fill a block


def loader(config: dict, block_size: int, vocabulary: int, rank: int, world_size: int, *, train: bool) -> DataLoader:
    data = PackedDocuments(
        config, block_size, vocabulary, rank, world_size, seed=0 if train else 1_000_000, endless=train
    )
    return DataLoader(data, batch_size=config["batch_size"], drop_last=True)
