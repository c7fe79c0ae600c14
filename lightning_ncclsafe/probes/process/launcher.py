"""Which rank of which job this process is, by what its launcher has put into the environment."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process's place in its job.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        world_size: Number of ranks; 1 where there is no launcher, or where it does not say how to reach the others.
        master_addr: Host of the job's store.
        master_port: Its port.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


_LAST_PORT = 65_535
# Names of rank, local rank and number of ranks: of torchrun (and the first and last of Kubeflow), SLURM, Open MPI.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def launched(environment: Mapping[str, str]) -> Launched:
    """Reads the variables of torchrun, SLURM or Open MPI; ``MASTER_ADDR`` and ``MASTER_PORT`` are needed with all.

    Args:
        environment: The environment of the process.

    Raises:
        ValueError: If a launcher says which rank this is, and ``MASTER_PORT`` is no port.
    """
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    for rank, local_rank, world_size in _LAUNCHERS:
        known = [_number(environment.get(name)) for name in (rank, world_size)]
        if address and port and known[0] is not None and known[1] is not None and known[0] < known[1]:
            return Launched(
                rank=known[0],
                local_rank=_number(environment.get(local_rank)) or 0,
                world_size=known[1],
                master_addr=address,
                master_port=_port(port),
            )
    return Launched()


def _port(text: str) -> int:
    port = _number(text)
    if port is None or not 1 <= port <= _LAST_PORT:
        raise ValueError(
            f"MASTER_PORT={text} is no port; set it to a number from 1 to {_LAST_PORT}, on all ranks alike"
        )
    return port


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
