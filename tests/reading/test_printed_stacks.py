"""Stacks that py-spy has printed for several processes of one host."""

import pytest
from made_logs import judged, read

from lightning_ncclsafe.facts.findings import Confidence

HEAD = "Process {}: /opt/conda/bin/python -u train_mt.py {} --arch big\nPython v3.11.8 (/opt/conda/bin/python3.11)\n\n"
MAIN = 'Thread {} (idle): "MainThread"\n'
OTHER = 'Thread 5890 (idle): "Thread-7"\n    wait (threading.py:302)\n    run (mt/iterators.py:598)\n'
LOOP = "    train_epoch (train_mt.py:276)\n    <module> (train_mt.py:402)\n"
REDUCE = "    all_reduce (torch/distributed/distributed_c10d.py:1320)\n    log_outputs (mt/trainer.py:1188)\n"
GATHER = "    all_gather (torch/distributed/distributed_c10d.py:2101)\n    logits (mt/model.py:88)\n"
QUEUE = "    wait (threading.py:302)\n    get (queue.py:170)\n    __next__ (mt/iterators.py:651)\n"
LOADER = "    poll (multiprocessing/popen_fork.py:30)\n    __next__ (torch/utils/data/dataloader.py:530)\n"
COMPUTES = "    forward (mt/model.py:44)\n    _call_impl (torch/nn/modules/module.py:1512)\n"


def dumped(*stacks: str, command: str = "--local_rank={}") -> str:
    every = (
        HEAD.format(5121 + rank, command.format(rank)) + MAIN.format(5121 + rank) + stack + LOOP + OTHER + "\n"
        for rank, stack in enumerate(stacks)
    )
    return "$ for p in $(pgrep -f train_mt.py); do py-spy dump --pid $p; done\n" + "".join(every)


@pytest.mark.parametrize("command", ["--local_rank={}", "--local-rank {}", "--rank={}", "sglang::scheduler_TP{}"])
@pytest.mark.parametrize(
    ("stack", "at"), [(QUEUE, "__next__ (mt/iterators.py:651)"), (LOADER, "train_epoch (train_mt.py:276)")]
)
def test_a_rank_that_waits_for_something_else_has_not_arrived(stack: str, at: str, command: str) -> None:
    first = judged(dumped(stack, REDUCE, REDUCE, command=command)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (0,), Confidence.POSSIBLE)
    assert f"py-spy shows that rank 0 is at {at}" in first.summary
    assert "ranks 1-2 are in all_reduce" in first.summary


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    first = judged(dumped(REDUCE, GATHER)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (0, 1), Confidence.POSSIBLE)
    assert "rank 0 is in all_reduce, and rank 1 is in all_gather" in first.summary


@pytest.mark.parametrize(
    "log",
    [
        dumped(REDUCE, REDUCE),
        dumped(QUEUE, QUEUE),
        dumped(REDUCE),
        # It may have called all that others have, as collectives of GPUs do not wait.
        dumped(COMPUTES, REDUCE, REDUCE),
        dumped(COMPUTES, QUEUE, REDUCE),
        # They may be of several groups, or each other's.
        dumped(REDUCE, GATHER, REDUCE),
        dumped(REDUCE.replace("all_reduce", "send"), REDUCE.replace("all_reduce", "recv")),
        # Two hosts.
        "$ torchrun --nnodes=2 --node_rank=1 train_mt.py\n" + dumped(QUEUE, REDUCE),
        dumped(QUEUE, REDUCE) + dumped(REDUCE, REDUCE),
        dumped(QUEUE, REDUCE, command="--config={}.yaml"),
    ],
    ids=[
        "in one",
        "in none",
        "one rank",
        "computes",
        "one of them computes",
        "three",
        "to each other",
        "of two hosts",
        "two hosts",
        "no numbers",
    ],
)
def test_stacks_that_show_no_late_rank(log: str) -> None:
    assert read(log) is None


def test_local_variables_do_not_end_a_stack() -> None:
    below = "        Locals:\n            row: (1, 2)\n"
    reduce = REDUCE.replace(":1320)\n", f":1320)\n{below}")
    first = judged(
        dumped(QUEUE.replace(":302)\n", f":302)\n{below}"), "    wait (threading.py:302)\n" + below + reduce)
    )
    assert first.findings[0].ranks == (0,)
    assert "rank 1 is in all_reduce" in first.findings[0].summary


def test_many_processes_are_not_compared() -> None:
    assert read(dumped(QUEUE, *[REDUCE] * 2000)) is None
