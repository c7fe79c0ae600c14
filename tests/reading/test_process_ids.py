"""Lines that give a process ID only, in a log of which other lines say which rank that is."""

import pytest
from made_logs import judged

from lightning_ncclsafe.reading.process_ids import ProcessIds

OOM = "kernel: Memory cgroup out of memory: Killed process 414 (python3.11) total-vm:91203388kB\n"
SAYS = "INFO: distributed run on cn-501, rank 3 / size 4, pid 414\n"
NCCL = "cn-501:414:977 [1] NCCL INFO "
COMMUNICATOR = NCCL + "comm 0x7fd694002360 rank {} nranks {} cudaDev 1 nvmlDev 1 busId 2000 - Init COMPLETE\n"
NO_ROOM = "cn-501:414:977 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n"


@pytest.mark.parametrize(
    ("log", "rule", "ranks"),
    [
        (OOM, "dead-rank", ()),
        (SAYS + OOM, "dead-rank", (3,)),
        ("Started pid=414 as rank=3 of 4\n" + OOM, "dead-rank", (3,)),
        (SAYS + "run.sh: line 12:   414 Killed   python train.py\n", "dead-rank", (3,)),
        (COMMUNICATOR.format(3, 4) + OOM, "dead-rank", (3,)),
        (NCCL + "Channel 00 : 3[100000] -> 1[200000] via direct shared memory\n" + NO_ROOM, "shm-exhausted", (3,)),
        (COMMUNICATOR.format(3, 4) + NO_ROOM, "shm-exhausted", (3,)),
        (
            COMMUNICATOR.format(3, 4) + "NVRM: Xid (PCI:0000:02:00): 79, pid='414', name=python3, fallen off the bus\n",
            "failed-rank",
            (3,),
        ),
    ],
)
def test_a_process_is_the_rank_that_other_lines_say(log: str, rule: str, ranks: tuple[int, ...]) -> None:
    first = judged(log).findings[0]
    assert (first.rule, first.ranks) == (rule, ranks)


@pytest.mark.parametrize(
    ("lines", "rank"),
    [
        # A group of some ranks numbers its own.
        ([COMMUNICATOR.format(1, 2), COMMUNICATOR.format(5, 8)], 5),
        ([COMMUNICATOR.format(5, 8), COMMUNICATOR.format(1, 2)], 5),
        ([SAYS, COMMUNICATOR.format(1, 8)], 3),
        # Groups of some ranks alone, of which there are several.
        ([COMMUNICATOR.format(1, 2), COMMUNICATOR.format(1, 2).replace("414", "415")], None),
        ([COMMUNICATOR.format(1, 2), COMMUNICATOR.format(0, 2).replace("414", "415")], 1),
        # Two hosts have a process of this number, or two groups of one size the rank.
        ([COMMUNICATOR.format(5, 8), COMMUNICATOR.format(2, 8)], None),
        ([SAYS, SAYS.replace("rank 3", "rank 5"), SAYS], None),
        # Who receives is the other one.
        ([NCCL + "Channel 00/0 : 3[3] -> 1[1] [receive] via NET/Socket/0\n"], None),
        ([NCCL + "Channel 00/0 : 3[3] -> 1[1] [send] via NET/Socket/0\n"], 3),
        # Numbers within a host, or other processes.
        (["local rank 3, pid 414\n"], None),
        (["node rank 3, pid 414\n"], None),
        (["local_rank=3 pid=414\n"], None),
        (["rank 3 of 4 has ended 2 of 5 workers: pid 414\n"], None),
        (["local  rank 3 pid 414\n"], None),
        (["TP rank 3, pid 414\n"], None),
        (["data-parallel rank 3 pid 414\n"], None),
        # Somebody else.
        (["[pid 414] waiting for rank 3\n"], None),
        (["pid 414: connection closed by rank 3\n"], None),
        (["rank 3: killing child pid 414\n"], None),
        (["[rank: 3] Child process with PID 414 terminated with code -9\n"], None),
        # Who it is.
        (["global rank 3, PID: 414\n"], 3),
        (["[rank 3] pid=414\n"], 3),
        (["(pid=414, rank=3)\n"], 3),
        (["rank 9999999 pid 414\n"], None),
        ([SAYS.replace("414", "4140")], None),
    ],
)
def test_what_says_which_rank_a_process_is(lines: list[str], rank: int | None) -> None:
    processes = ProcessIds()
    for line in lines:
        processes.read(line)
    assert processes.rank_of("414") == rank
    assert processes.rank_by(NO_ROOM) == rank


def test_a_limited_number_of_processes_is_kept() -> None:
    processes = ProcessIds()
    for pid in range(100_000, 200_000):
        processes.read(f"rank 1 pid {pid}\n")
    assert processes.rank_of("100000") == 1
    assert processes.rank_of("199999") is None
    for size in range(2, 700):
        for rank in range(min(size, 300)):
            processes.read(f"a:414:1 [0] NCCL INFO comm 0x1 rank {rank} nranks {size} cudaDev 0\n")
    assert len(processes._members) <= 65_536


def test_processes_of_several_hosts_may_have_one_number() -> None:
    there = COMMUNICATOR.format(5, 8).replace("cn-501", "cn-777")
    first = judged(COMMUNICATOR.format(3, 8) + there + NO_ROOM).findings[0]
    assert (first.rule, first.ranks) == ("shm-exhausted", (3,))
    first = judged(COMMUNICATOR.format(3, 8) + there + OOM).findings[0]
    assert (first.rule, first.ranks) == ("dead-rank", ())
    elsewhere = judged(COMMUNICATOR.format(3, 8) + NO_ROOM.replace("cn-501", "cn-777")).findings[0]
    assert elsewhere.ranks == ()


def test_a_run_that_starts_again_has_other_processes() -> None:
    again = "[INFO] torch.distributed.elastic.agent: will restart worker group\n"
    later = COMMUNICATOR.format(3, 8).replace("414", "515")
    first = judged(COMMUNICATOR.format(3, 8) + again + later + OOM.replace("414", "515")).findings[0]
    assert (first.rule, first.ranks) == ("dead-rank", (3,))
