"""What a run is about to ask for, of its model and its loaders."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_ncclsafe.facts import LoadFacts
from lightning_ncclsafe.preflight.load import loaders_load, model_load


class Files(Dataset[Any]):
    """Would have to be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is read")


def test_a_model_needs_memory_for_parameters_gradients_and_buckets() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.BatchNorm1d(10))
    model[0].weight.requires_grad_(False)
    load = model_load(model)
    # 100 + 2 * 10 parameters and two running means of 10, of four bytes; one count of eight.
    assert load.parameter_bytes == 4 * (100 + 20 + 20) + 8
    assert load.gradient_bytes == 4 * 20
    assert load.replica_bytes == load.parameter_bytes + 2 * 4 * 20
    assert load.omp_threads == torch.get_num_threads()


def test_an_unbuilt_model_has_an_unknown_size() -> None:
    assert model_load(None) == LoadFacts(omp_threads=torch.get_num_threads())
    assert model_load(torch.nn.LazyLinear(3)).parameter_bytes is None


def test_loads_of_concurrent_loaders_add_up() -> None:
    rows = TensorDataset(torch.zeros(100, 8), torch.zeros(100, dtype=torch.int64))
    loaders = [
        DataLoader(Subset(rows, range(50)), batch_size=16, num_workers=2, prefetch_factor=5),
        DataLoader(rows, batch_size=4, num_workers=1),
        [1, 2, 3],
    ]
    assert loaders_load(loaders) == LoadFacts(loader_workers=3, batches_in_flight=12, batch_bytes=16 * (8 * 4 + 8))


def test_data_is_not_read_to_find_its_size() -> None:
    load = loaders_load([DataLoader(Files(), batch_size=4, num_workers=1)])
    assert (load.loader_workers, load.batches_in_flight, load.batch_bytes) == (1, 2, None)
