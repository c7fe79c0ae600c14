"""What launchers, stores, NCCL and tools say in so many words, one line each, and what it is judged to mean."""

import io
from pathlib import Path

import pytest
from effort import growth
from made_logs import TRACEBACK, judged, prefixed, read, timeout

from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.statements import Statements

LIKELY, POSSIBLE = Confidence.LIKELY, Confidence.POSSIBLE
ELASTIC = (
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {}) local_rank: {} (pid: 7) of binary: x\n"
)
DEEPSPEED = (
    "[ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'm.py', '--local_rank={}'] exits with return code = {}\n"
)
KILLED = "[INFO] [launch.py:315:sigkill_handler] Killing subprocess {}\n"
RAY = "(raylet) A worker died. Worker PID: {} Worker exit type: SYSTEM_ERROR Worker exit detail: error code 2.\n"
RAS = (
    "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    "  Rank 3 -- GPU 3 managed by process 77 on node 10.0.0.1\n"
)

UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error "
    "indicates that your module has parameters that were not used in producing loss.\nIf you already have done so\n"
    "Parameter indices which did not receive grad for rank 3: 282 283\n"
)
STALL = (
    "[2021-03-01 10:00:00.1: W horovod/common/stall_inspector.cc:105] One or more tensors were submitted to be "
    "reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for 60 seconds."
)

STUCK = (
    "[rank{0}]:[E218 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank {0}] ProcessGroupNCCL's watchdog "
    "got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
)
HANG = (
    "[rank{0}]:[F218 ProcessGroupNCCL.cpp:1306] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Terminating the process after "
    "attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
)
UNIQUE_ID = (
    "torch.distributed.DistBackendError: [{0}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
    "via c10d key-value store by key '0', but store->get('0') got error: {1}\n"
    "Exception raised from recvBytes at Utils.hpp:678 (most recent call first):\n"
    ". This may indicate a possible application crash on rank 0 or a network set up issue.\n"
)
MISMATCHED = (
    "a:1:2 [3] init.cu:1197 NCCL WARN Mismatched collective detected, please check your collective calls at and "
)
REFUSED = "socketPollConnect: connect returned Connection refused, exceeded error retry count (35)\n"
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network "
    "error, NCCL version 2.26.2\n"
)

# What stands in the log, the first finding's name, its ranks, and how sure it is.
STATEMENTS = {
    "Ray's memory monitor": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "NCCL, a mismatch at several ranks": (
        "".join(f"{MISMATCHED}around rank {rank}. You can use NCCL_DEBUG=INFO\n" for rank in (11, 9)),
        "diverged-collectives",
        (9, 11),
        LIKELY,
    ),
    "NCCL, the two ends of a transfer": (
        "a:1:2 [0] transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.0.0.1<5> collective mismatch "
        "error, local size 4096 remote size 512\n",
        "mismatched-collective",
        (),
        LIKELY,
    ),
    "NCCL, refused until it gives up": (
        f"a:1:2 [1] misc/socket.cc:544 NCCL WARN {REFUSED}"
        + prefixed("[rank1]: [rank1]: ", TRACEBACK.replace("ValueError: bad label 11\n", REMOTE))
        + ELASTIC.format(1, 1),
        "network-cut",
        (),
        POSSIBLE,
    ),
    "NCCL, refused, and no traceback": (f"[rank1]: {REFUSED}{ELASTIC.format(1, 1)}", "network-cut", (), POSSIBLE),
    "ends because of stuck watchdogs": (STUCK.format(7) + HANG.format(3), "watchdog-stuck", (3, 7), POSSIBLE),
    "Ray, after a stuck watchdog": (STUCK.format(1) + RAY.format(77), "watchdog-stuck", (1,), POSSIBLE),
    "a killed process beside a stuck watchdog": (
        STUCK.format(1) + "[12.5] Out of memory: Killed process 41022 (python3)\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "the id of rank 0, in vain": (UNIQUE_ID.format(3, "Socket Timeout"), "late-at-init", (0,), LIKELY),
    "the id of rank 0, and the store is lost": (
        UNIQUE_ID.format(3, "failed to recv, got 0 bytes"),
        "late-at-init",
        (0,),
        POSSIBLE,
    ),
    "the id of rank 0, and the store is reset": (
        UNIQUE_ID.format(3, "Connection reset by peer"),
        "late-at-init",
        (0,),
        POSSIBLE,
    ),
    "Ray Train's snippet": ("[Rank 12 Error Snippet]:\n" + TRACEBACK, "failed-rank", (12,), POSSIBLE),
    "the kernel's out-of-memory killer": (
        "[1722011.12] Memory cgroup out of memory: Killed process 41022 (python3) total-vm:201221100kB\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "SageMaker's prefix": (prefixed("[1,mpirank:3,algo-1]<stderr>:", TRACEBACK), "failed-rank", (3,), POSSIBLE),
    "torchrun, a signal": (ELASTIC.format(-9, 3), "dead-rank", (3,), LIKELY),
    "torchrun, an exit code": (ELASTIC.format(1, 3), "failed-rank", (3,), POSSIBLE),
    "torchrun, one host of several": ("world_size=64\n" + ELASTIC.format(-9, 3), "dead-rank", (), LIKELY),
    "DeepSpeed": (KILLED.format(1) + KILLED.format(2) + DEEPSPEED.format(1, -9), "dead-rank", (), LIKELY),
    "DeepSpeed, one process": (KILLED.format(1) + DEEPSPEED.format(0, -9), "dead-rank", (0,), LIKELY),
    "torchrun of torch 1.9": (
        "Child process 77 (local_rank 2) FAILED (exitcode 1)\nError msg: Process failed with exitcode 1\n",
        "failed-rank",
        (2,),
        POSSIBLE,
    ),
    "torchrun's table on one line": (
        "Root Cause (first observed failure): [0]: time : 2024-01-01_00:00:00 host : node-a rank : 2 (local_rank: 2) "
        "exitcode : -9 (pid: 7) error_file: <N/A> traceback : Signal 9 (SIGKILL) received by PID 7\n",
        "dead-rank",
        (2,),
        LIKELY,
    ),
    "spawn, an exception of which no more is there": (
        "-- Process 3 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "/home/me/train.py", line 9, in main\n',
        "failed-rank",
        (3,),
        POSSIBLE,
    ),
    "spawn": ("process 2 terminated with signal SIGSEGV\n", "dead-rank", (2,), LIKELY),
    "mpirun": (
        "prterun noticed that process rank 5 with PID 0 on node a exited on signal 9 (Killed).\n",
        "dead-rank",
        (5,),
        LIKELY,
    ),
    "mpirun, the first to end": (
        "mpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be "
        "terminated. The first process to do so was:\n\n  Process name: [[29973,1],6]\n  Exit code:    1\n",
        "failed-rank",
        (6,),
        POSSIBLE,
    ),
    "prterun, the first to end": (
        "job to be terminated. The first process to do so was:\n\n   Process name: [prterun-node-a-77@1,2]\n"
        "   Exit code:    139\n",
        "dead-rank",
        (2,),
        LIKELY,
    ),
    "horovodrun": (
        "job to be terminated. The first process to do so was:\nProcess name: 3\nExit code:    1\n",
        "failed-rank",
        (3,),
        POSSIBLE,
    ),
    "Horovod, of each that failed": (
        "Process 1 exit with status code 250.\nProcess 0 exit with status code 1.\n",
        "failed-rank",
        (0, 1),
        POSSIBLE,
    ),
    "Horovod, one that was killed": (
        "Process 2 exit with status code 134.\nProcess 0 exit with status code 137.\n"
        "Process 1 exit with status code 1.\n",
        "dead-rank",
        (0,),
        LIKELY,
    ),
    "Horovod's elastic driver": (
        "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job "
        "to be terminated. The first process to do so was:\nProcess name: worker-1[0]\nExit code: 137\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "Horovod's prefix": (prefixed("Fri Sep 25 16:52:53 2020[5]<stderr>:", TRACEBACK), "failed-rank", (5,), POSSIBLE),
    "mpirun's prefix with the time": (
        "Fri Aug 11 12:31:45 2023[1,3]<stdout>:a:1:2 [3] transport.cc:154 NCCL WARN Cuda failure 'invalid argument'\n",
        "failed-rank",
        (3,),
        POSSIBLE,
    ),
    "MPI, a peer": (
        "An MPI communication peer process has unexpectedly disconnected.  This\nusually indicates a failure in the\n",
        "dead-rank",
        (),
        POSSIBLE,
    ),
    "Intel's MPI": (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 4 PID 77 RUNNING AT node-a\n"
        "=   KILLED BY SIGNAL: 9 (Killed)\n",
        "dead-rank",
        (4,),
        LIKELY,
    ),
    "MPICH, which names no rank": (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 77 RUNNING AT node-a\n=   EXIT CODE: 9\n"
        "=   CLEANING UP REMAINING PROCESSES\n=====\n"
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "MPI_ABORT": (
        "MPI_ABORT was invoked on rank 5 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n",
        "failed-rank",
        (5,),
        POSSIBLE,
    ),
    "composer": ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.\n", "dead-rank", (2,), LIKELY),
    "composer, an exception": (
        "ERROR:composer.cli.launcher:Rank 2 crashed with exit code 1.\n",
        "failed-rank",
        (2,),
        POSSIBLE,
    ),
    "the end of what is said of NCCL's id": (
        "[rank2]: . This may indicate a possible application crash on rank 0 or a network set up issue.\n",
        "late-at-init",
        (0,),
        LIKELY,
    ),
    "how NCCL's own code came back": (
        "a:1:2 [0] NCCL INFO misc/socket.cc:505 -> 2 (Operation now in progress)\n"
        "a:1:2 [0] NCCL INFO bootstrap.cc:275 -> 2\n",
        "network-cut",
        (),
        POSSIBLE,
    ),
    "InfiniBand": (
        "a:1:2 [0] ibvwrap.cc:1 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0\n",
        "network-cut",
        (),
        POSSIBLE,
    ),
    "NCCL's words of a failed call": (
        "[rank3]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "[rank3]: Last error:\n[rank3]: socketStartConnect: Connect to 127.0.0.1<45069> failed : Connection refused\n",
        "network-cut",
        (),
        POSSIBLE,
    ),
    "what nothing has caught": (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\n",
        "failed-rank",
        (),
        POSSIBLE,
    ),
    "a worker that was ended": (
        prefixed("[rank0]: ", TRACEBACK.rpartition("ValueError")[0])
        + "[rank0]: RuntimeError: DataLoader worker (pid 9014) is killed by signal: Terminated. \n",
        "failed-rank",
        (0,),
        POSSIBLE,
    ),
    "vLLM": (
        "ERROR 07-01 13:54:43 x.py:120] Worker VllmWorkerProcess pid 1159 died, exit code: -9\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "vLLM, newer": (
        "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n",
        "dead-rank",
        (1,),
        POSSIBLE,
    ),
    "Ray's trainer": ("(TorchTrainer pid=7) Worker 2 has failed.\n" + RAY.format(9), "dead-rank", (2,), POSSIBLE),
    "spawn, cut": ("ProcessExitedException: process 3 terminated with\n", "dead-rank", (3,), POSSIBLE),
    "PyTorch's tests": (
        "RuntimeError: Process 1 exited with error code 10 and exception:\nTraceback (most recent call last):\n"
        '  File "a.py", line 2, in f\n    g()\nValueError: bad\n',
        "failed-rank",
        (1,),
        POSSIBLE,
    ),
    "no NCCL": (
        "-- Process 0 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "a.py", line 2, in f\n    g()\n'
        "RuntimeError: Distributed package doesn't have NCCL built in\n",
        "failed-rank",
        (0,),
        POSSIBLE,
    ),
    "Horovod waits": (f"{STALL}\nStalled ops:\na/b_0 [missing ranks: 1, 3]\n", "silent-rank", (1, 3), POSSIBLE),
    "Horovod waits, and mpirun knows how many ranks there are": (
        f"$ mpirun -np 4 -x PATH python train.py\n{STALL}\nStalled ops: a [ready ranks: 3, 1], b [ready ranks: 1]\n",
        "silent-rank",
        (0, 2),
        POSSIBLE,
    ),
    "Horovod waits, by rank": (f"{STALL}\nMissing ranks:\n0: [a, b ...]\n", "silent-rank", (0,), POSSIBLE),
    "Horovod waits, by mpirun's tags": (
        f"[1,0]<stderr>:{STALL}\n[1,0]<stderr>:Stalled ops:a [missing ranks: 1]\n[1,0]<stderr>:b [missing ranks: 1]\n",
        "silent-rank",
        (1,),
        POSSIBLE,
    ),
    "Horovod's ranks wait for each other": (
        f"{STALL} Stalled ops: a [ready ranks: 3], b [ready ranks: 2, 0, 1]\n",
        "diverged-collectives",
        (3,),
        POSSIBLE,
    ),
    "Horovod's ranks wait for each other, by rank": (
        f"{STALL}\nMissing ranks:\n0: [a]\n1: [b]\n",
        "diverged-collectives",
        (0, 1),
        POSSIBLE,
    ),
    "vLLM's engine": ("Engine core proc EngineCore_DP0 died unexpectedly.\n", "dead-rank", (), POSSIBLE),
    "Ray": (RAY.format(9), "dead-rank", (), POSSIBLE),
    "SLURM": ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n", "dead-rank", (), LIKELY),
    "Lightning": (
        "[rank: 3] Child process with PID 9 terminated with code -9. Forcefully\n",
        "dead-rank",
        (3,),
        LIKELY,
    ),
    "old launcher": (
        "CalledProcessError: Command '['a', '--local_rank=7']' died with <Signals.SIGBUS: 7>.\n",
        "dead-rank",
        (),
        LIKELY,
    ),
    "store, new words": (
        "DistStoreError: Timed out initializing process group in store based barrier on rank 0, for key: "
        "store_based_barrier_key:1 (world_size=2, num_workers_joined=1, timeout=0:30:00 error=x)\n",
        "late-at-init",
        (1,),
        LIKELY,
    ),
    "store, clients": (
        "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.\n",
        "late-at-init",
        (),
        LIKELY,
    ),
    "model of another size": (
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 12 params, while rank 2 has "
        "inconsistent 10 params.\n",
        "mismatched-collective",
        (0, 2),
        LIKELY,
    ),
    "RAS misses a rank": (RAS, "silent-rank", (3,), LIKELY),
    "Xid": ("NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n", "failed-rank", (), POSSIBLE),
    "two versions of NCCL": (
        "Mismatched NCCL version detected : rank 0 version 22005 rank 4 version 21805\n",
        "failed-rank",
        (0, 4),
        LIKELY,
    ),
    "gloo at the start": (
        "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error\n",
        "network-cut",
        (),
        POSSIBLE,
    ),
    "Python's own word": ("Fatal Python error: Segmentation fault\n", "dead-rank", (), LIKELY),
    "UCX": ("[node-a:77   :0:77] Caught signal 11 (Segmentation fault: address not mapped)\n", "dead-rank", (), LIKELY),
    "a monitored barrier": (
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank.\n",
        "silent-rank",
        (0,),
        POSSIBLE,
    ),
    "a logger's traceback": (
        "[2025-02-07 03:10:26 TP11] Scheduler hit an exception: " + TRACEBACK,
        "failed-rank",
        (11,),
        POSSIBLE,
    ),
    "a line that breaks after the rank": (
        "".join(
            f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with "
            f"exception: [Rank {rank}]\n Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, "
            "OpType=BROADCAST, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) ran f\nor 1800010 milliseconds before "
            "timing out.\nException raised from checkTimeout\n"
            for rank in (1, 2, 3)
        ),
        "silent-rank",
        (0,),
        LIKELY,
    ),
    "a rank that was given twice": (
        "hpc-14:185:18835 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in\n",
        "failed-rank",
        (1,),
        POSSIBLE,
    ),
    "two sizes": (
        "hpc-14:185:18835 [0] NCCL WARN Bootstrap Root : mismatch in rank count from procs 8 : 4\n",
        "failed-rank",
        (),
        POSSIBLE,
    ),
    "a port that is taken, by nobody in particular": (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. The "
        "server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n",
        "failed-rank",
        (),
        POSSIBLE,
    ),
    "no network interface": (
        "[rank2]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, internal error, NCCL version 2.21.5\n"
        "[rank2]: ncclInternalError: Internal check failed.\n[rank2]: Last error:\n"
        "[rank2]: Bootstrap : no socket interface found\n",
        "failed-rank",
        (2,),
        POSSIBLE,
    ),
    "parameters that got no gradient": (UNUSED, "failed-rank", (3,), POSSIBLE),
    "a loader's worker": (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory.\n",
        "failed-rank",
        (),
        POSSIBLE,
    ),
    "a store that is a file": (
        'dist.init_process_group(init_method="file:///shared/store")\nRuntimeError: Wait timeout\n',
        "late-at-init",
        (),
        LIKELY,
    ),
    "srun, several": (
        "srun: error: node-a: tasks 2-3: Exited with exit code 1\nsrun: error: node-b: tasks 8,10-11: Exited with exit "
        "code 1\n",
        "failed-rank",
        (2, 3, 8, 10, 11),
        POSSIBLE,
    ),
    "srun, one of several was killed": (
        "srun: error: node-a: task 2: Exited with exit code 1\nsrun: error: node-a: task 3: Out Of Memory\n",
        "dead-rank",
        (3,),
        LIKELY,
    ),
    "srun, of torchrun": (
        "srun: error: node-a: task 3: Out Of Memory\n"
        "WARNING:torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting down workers\n",
        "dead-rank",
        (),
        POSSIBLE,
    ),
    "srun": ("srun: error: node-3: task 24: Killed\n", "dead-rank", (24,), POSSIBLE),
    "srun, of those that it has killed the first is not said": (
        "srun: error: node-3: task 24: Killed\nsrun: error: node-4: task 32: Killed\n",
        "dead-rank",
        (),
        POSSIBLE,
    ),
    "Paddle": (
        "Container rank 3 status failed cmd ['python3', 'train.py'] code 1 log log/workerlog.3\n",
        "failed-rank",
        (3,),
        POSSIBLE,
    ),
    "Lightning, before it named ranks": (
        "Child process with PID 652 terminated with code 1. Forcefully terminating all other processes\n",
        "failed-rank",
        (),
        POSSIBLE,
    ),
    "gloo, a longer message": (
        "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 1046204 vs 1040256\n",
        "mismatched-collective",
        (),
        LIKELY,
    ),
    "NCCL's own error says nothing of a peer": (
        '[rank5]: Traceback (most recent call last):\n[rank5]:   File "/app/train.py", line 8, in <module>\n'
        "[rank5]: torch.distributed.DistBackendError: NCCL error in: a.hpp:317, internal error, NCCL version 2.21.5\n",
        "failed-rank",
        (5,),
        POSSIBLE,
    ),
    "an old watchdog that has met an error": (
        "[E ProcessGroupNCCL.cpp:916] [Rank 7] NCCL watchdog thread terminated with exception: CUDA error: unknown\n",
        "failed-rank",
        (7,),
        LIKELY,
    ),
    "Horovod's tags within a line": (
        "[1,0]<stderr>:[[1,0]<stderr>:W op.cc:1[1,0]<stderr>:] One or more tensors were submitted to be reduced, by a "
        "subset of ranks\n"
        "[1,0]<stderr>:Stalled ranks:\n[1,0]<stderr>:2: [HorovodAllreduce][1,0]<stderr>:\n",
        "silent-rank",
        (2,),
        POSSIBLE,
    ),
    "Open MPI": ("[a:7] *** Process received signal *** Signal: Bus error (7)\n", "dead-rank", (), LIKELY),
    "a key of the start": (
        "[rank2]: DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//store_based_barrier_key:1\n",
        "late-at-init",
        (),
        LIKELY,
    ),
    "torchrun's agents": (
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n",
        "late-at-init",
        (),
        LIKELY,
    ),
    "the store's port": (
        "The client socket has failed to connect to [node-a]:29500 (errno: 110 - Connection timed out).\n",
        "network-cut",
        (),
        POSSIBLE,
    ),
    "a port that is taken": (
        "[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n",
        "failed-rank",
        (0,),
        POSSIBLE,
    ),
    "the exception of another rank": (
        prefixed("[rank0]: ", TRACEBACK.replace("last):", "last): (RANK 4)")),
        "failed-rank",
        (4,),
        POSSIBLE,
    ),
    "heartbeat": (
        "[rank6]:[E ProcessGroupNCCL.cpp:1] [PG 0 Rank 6] Heartbeat monitor timed out! Process will\n",
        "watchdog-stuck",
        (6,),
        POSSIBLE,
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_give_their_findings(name: str) -> None:
    text, rule, ranks, confidence = STATEMENTS[name]
    first = judged(text).findings[0]
    assert (first.rule, first.ranks, first.confidence) == (rule, ranks, confidence), first.summary
    assert first.evidence and first.remedy


def test_aborts_and_launcher_signals_are_not_causes() -> None:
    for code in (-6, -15, 0):
        assert read(DEEPSPEED.format(1, code)) is None or not judged(DEEPSPEED.format(1, code)).findings
    ended = judged("world_size=3\n" + timeout(0) + timeout(1) + ELASTIC.format(-6, 0)).findings
    assert [finding.rule for finding in ended] == ["silent-rank"]


AGENT = '  File "/venv/lib/python3.12/site-packages/torch/distributed/{}", line 9, in {}\n'
FAULT = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f4e (most recent call first):\n"


def test_a_crashed_launcher_is_not_a_dead_rank() -> None:
    wrapper = AGENT.format("elastic/multiprocessing/errors/__init__.py", "wrapper")
    barrier, agent = AGENT.format("distributed_c10d.py", "barrier"), AGENT.format("elastic/agent/server/api.py", "run")
    for begin in (FAULT, "terminate\n" + FAULT):
        assert judged(begin + barrier + wrapper).findings[0].rule == "dead-rank"
        assert judged(begin + barrier + "End\n" + agent).findings[0].rule == "dead-rank", "another stack"
        assert read(begin + agent + wrapper) is None
        forked = '  File "/usr/lib/python3.12/multiprocessing/process.py", line 314 in _bootstrap\n'
        assert judged(begin + barrier + forked + agent).findings[0].rule == "dead-rank"


def test_launcher_tasks_are_not_ranks() -> None:
    ended = "srun: error: node-a: task 1: Exited with exit code 1\n"
    assert judged(ended).findings[0].ranks == (1,)
    closed = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
    for text in (closed + ended, ended + closed):
        assert read(text) is None or not judged(text).findings


def test_the_earliest_root_cause_of_several_launchers_counts() -> None:
    table = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2023-06-03_22:{}\n  host      : node-{}\n"
        "  rank      : {} (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n"
    )
    for second, ranks in (("45:52", (4,)), ("45:05", (0, 4)), ("44:01", (0,))):
        text = table.format(second, "a", 0) + table.format("45:01", "b", 4)
        assert judged(text).findings[0].ranks == ranks
    assert judged(table.format("99:99", "a", 0) + table.format("45:01", "b", 4)).findings[0].ranks == (0, 4)


def test_an_exception_line_without_traceback_does_not_explain_a_signal() -> None:
    killed = "Process 0 exit with status code 137.\n"
    said = judged("[0]<stderr>:RuntimeError: check and exit\n" + killed).findings[0]
    assert (said.rule, said.ranks) == ("dead-rank", (0,))
    assert judged(prefixed("[0]<stderr>:", TRACEBACK) + killed).findings[0].rule == "failed-rank"


def test_a_failure_reported_twice_is_one_finding() -> None:
    where = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in step\n    model(batch)\n'
    said = judged(where + UNUSED).findings
    assert [(one.rule, one.ranks) for one in said] == [("failed-rank", (3,))]
    assert "train.py:9" in said[0].summary
    worker = "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory.\n"
    said = judged(worker + where + "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.\n").findings
    assert len(said) == 1 and "train.py:9" in said[0].summary


def test_a_broken_transfer_does_not_blame_its_address() -> None:
    address = "fe80::966d:ae03:8b:df78%ib0<53249>"
    broken = f"a:1:2 [1] NCCL WARN NET/IB : Got completion from peer {address} with error 4, opcode 1, len 1\n"
    assert [one.confidence for one in judged(broken).findings] == [POSSIBLE]
    refused = f"a:1:2 [1] NCCL WARN Net : Connect to {address} failed : Connection timed out\n"
    assert [one.confidence for one in judged(refused).findings] == [LIKELY]


def test_a_table_takes_precedence_over_the_line_above_it() -> None:
    table = "Root Cause (first observed failure):\n  host : b\n  rank : 11 (local_rank: 3)\n  exitcode : -9 (pid: 7)\n"
    assert [finding.ranks for finding in judged(ELASTIC.format(-9, 3) + table).findings] == [(11,)]


def test_a_worker_that_gave_up_is_not_a_dead_rank() -> None:
    gave_up = "(RayWorker pid=9) [E ProcessGroupNCCL.cpp:474] " + timeout(0).partition("] ")[2].splitlines()[0]
    rules = {finding.rule for finding in judged(gave_up + "\n" + RAY.format(9)).findings}
    assert "dead-rank" not in rules
    assert "dead-rank" in {finding.rule for finding in judged(gave_up + "\n" + RAY.format(10)).findings}


def test_ranks_that_wait_at_the_store_may_still_be_joined() -> None:
    wait = (
        "INFO:root:Waiting in store based barrier to initialize process group for rank: {}, key: k (world_size=3, "
        "worker_count=2, timeout=0:30:00)\n"
    )
    first = judged(wait.format(0) + wait.format(2)).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("late-at-init", (1,), POSSIBLE)
    assert (
        read(wait.format(0) + wait.format(2) + "INFO Rank 0: Completed store-based barrier for key:k with 3 nodes.\n")
        is None
    )


def test_a_peer_lost_after_a_timeout_is_a_consequence() -> None:
    lost = "[rank3]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:4\n"
    assert "dead-rank" not in {finding.rule for finding in judged(timeout(0) + timeout(1) + lost).findings}


def test_the_innermost_of_several_exceptions_counts() -> None:
    """An exception raised while another is handled is a consequence of it."""
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    outer = TRACEBACK.replace("ValueError: bad label 11", "TypeError: outer")
    for text in (TRACEBACK + chained + outer, TRACEBACK.replace("ValueError", "KeyError") + chained + outer):
        job = read(prefixed("[rank1]: ", text))
        assert job is not None and job.ranks[0].exception is not None
        assert job.ranks[0].exception.message == "bad label 11"


def test_an_exception_after_a_timeout_is_a_consequence() -> None:
    after = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", "RuntimeError: Invalid mt19937 state"))
    text = "world_size=3\n" + timeout(1) + timeout(2)
    assert judged(text + after).findings[0].rule == "silent-rank"
    assert judged(after + text).findings[0].rule == "failed-rank" or "raised" in "".join(
        judged(after + text).unanswered
    )


@pytest.mark.parametrize(
    "error", ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "KeyError: 'a'"]
)
def test_an_exception_without_traceback_is_read(error: str) -> None:
    first = judged(f"[rank11]: {error}\n" + timeout(0) + timeout(1)).findings[0]
    assert (first.ranks, first.confidence) == ((11,), LIKELY)
    cut = "\n".join(TRACEBACK.splitlines()[3:])
    found = judged(prefixed("[rank2]: ", cut) + timeout(0)).findings[0]
    assert (found.rule, found.ranks, found.location) == ("failed-rank", (2,), "/home/me/train.py:42 in training_step")


def test_an_exception_in_a_log_is_never_certain() -> None:
    killed = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed."
    for error in ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", killed):
        text = prefixed("[rank1]: ", TRACEBACK.replace("ValueError: bad label 11", error))
        assert all(finding.confidence is not Confidence.CERTAIN for finding in judged(text + timeout(0)).findings)


def test_only_the_default_group_spans_all_ranks() -> None:
    """Disjoint groups have shared a name in several versions."""
    apart = timeout(0, group="9") + timeout(1, group="9") + timeout(2, group="9", op="BROADCAST")
    assert judged(apart).findings[0].confidence is LIKELY
    assert judged(timeout(0) + timeout(1) + timeout(2, op="BROADCAST")).findings[0].confidence is Confidence.CERTAIN


def test_a_file_name_gives_the_rank_only_beside_others(tmp_path: Path) -> None:
    alone = {"rank_3.log": (), "8ranks.log": (), "allranks-4711.out": (), "hang-of-rank3.log": ()}
    for name, ranks in alone.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(TRACEBACK)
        assert _ranks_of(folder) == ranks, name
    folder = tmp_path / "several"
    folder.mkdir()
    for rank in range(4):
        (folder / f"run.rank_{rank}.log").write_text(TRACEBACK if rank == 3 else "epoch 0\n")
    assert _ranks_of(folder) == (3,)
    (folder / "run.rank_2.log").write_text(timeout(0) + TRACEBACK)
    assert _ranks_of(folder) == (0, 3)


def _ranks_of(folder: Path) -> tuple[int, ...]:
    evidence = Artifacts()
    evidence.read(str(folder))
    job = evidence.job()
    return tuple(facts.rank for facts in job.ranks) if job is not None else ()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_windows_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    text = ("world_size=4\n" + timeout(1) + timeout(2) + timeout(3)).replace("\n", "\r\n")
    mark = "\ufeff" if encoding.endswith("e") else ""
    (tmp_path / "train.log").write_bytes((mark + text).encode(encoding))
    evidence = Artifacts()
    evidence.read(str(tmp_path / "train.log"))
    job = evidence.job()
    assert job is not None and [facts.rank for facts in job.ranks] == [1, 2, 3] and job.world_size == 4


def test_unrecognised_error_lines_are_mentioned() -> None:
    strange = "[rank{}]:[E1126 18:44:12.7 ProcessGroupUCC.cpp:616] endpoint {} is gone\n"
    told = [
        line
        for line in judged("".join(strange.format(n, n) for n in range(5000))).unanswered
        if "format that is not known" in line
    ]
    assert len(told) == 1 and told[0].startswith("5,000 lines look like errors") and len(told[0]) < 700
    assert not [line for line in judged(timeout(0) + timeout(1)).unanswered if "format that is not known" in line]


def test_a_log_cut_off_at_the_last_rank_lowers_the_confidence() -> None:
    first = timeout(2).splitlines(keepends=True)[0]
    text = "world_size=4\n" + timeout(0) + timeout(1) + first
    for left_out in ("...\n", "(raylet) x [repeated 6x across cluster]\n"):
        assert judged(text + timeout(2) + left_out).findings[0].confidence is POSSIBLE
    assert judged(text + "[ra").findings[0].confidence is POSSIBLE
    assert judged(text + timeout(2)).findings[0].confidence is LIKELY


BAR = "Map:  {}%|▉   | {}/100 [{}<4:48, 155.57 examples/s]"


@pytest.mark.parametrize(
    ("bars", "works"), [(((9, "09:55"),), True), (((9, "00:10"),), False), (((9, "00:10"), (10, "00:11")), True)]
)
def test_a_progress_bar_that_continues_shows_a_working_rank(bars: tuple[tuple[int, str], ...], works: bool) -> None:
    first, *later = [BAR.format(done, done, elapsed) for done, elapsed in bars]
    text = first + timeout(1) + timeout(2) + "".join(f"{bar}\n" for bar in later)
    finding = judged(text).findings[0]
    assert (finding.rule, finding.ranks) == ("silent-rank", (0,))
    assert ("still at work" in finding.summary) is works


def test_progress_before_the_timeouts_shows_no_working_rank() -> None:
    text = "".join(BAR.format(done, done, f"00:{done}") for done in (10, 20, 30)) + timeout(1) + timeout(2)
    for later, works in (("", False), (BAR.format(31, 31, "00:31") + "\n", True)):
        assert ("still at work" in judged(text + later).findings[0].summary) is works


@pytest.mark.parametrize(
    "unit",
    [
        "Detected mismatch between collectives on ranks Rank 1 is running collective: ",
        "[E ProcessGroupNCCL.cpp:1] [Rank 1]",
        "9%|x| 1/2 [",
        "%|| ",
        "CalledProcessError: Command ",
        "Connection closed by peer gloo ",
        "#0-0 (ab) MISMATCH ",
        '  File "a", line 1, in ',
    ],
)
def test_the_time_for_a_line_is_proportional_to_its_length(unit: str) -> None:
    def read(length: int) -> None:
        data = ((unit * length)[:length] + "\n").encode() * 4
        evidence = Artifacts()
        evidence.log.read(io.BytesIO(data), len(data) + 1)
        evidence.job()

    assert growth(read, 4000) < 9, "four times the length"


def test_a_failed_rank_explains_horovods_warning() -> None:
    """A failed rank never arrives; the warning may come before or after its traceback."""
    failed = '[1,1]<stderr>:Traceback (most recent call last):\n[1,1]<stderr>:  File "a.py", line 2, in f\n'
    failed += "[1,1]<stderr>:    g()\n[1,1]<stderr>:ValueError: bad\n"
    warned = f"[1,0]<stderr>:{STALL}\n[1,0]<stderr>:Stalled ops:a [missing ranks: 1]\n"
    for text in (failed + warned, warned + failed):
        assert [one.rule for one in judged(text).findings] == ["failed-rank"]


def test_a_stuck_watchdog_has_given_up_nothing() -> None:
    found = judged("world_size=3\n" + timeout(1) + timeout(2) + HANG.format(1)).findings
    assert [(finding.rule, finding.ranks) for finding in found] == [("silent-rank", (0,))]


REPORT = (
    "[rank{0}]:[E1115 ProcessGroupNCCL.cpp:1936] Rank {0}\n\t - [{0}] Timeout at collective: ALLREDUCE, #{1}\n"
    "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "\t   - [{2}] joined but didn't finish collective #{1} (count from 1)\n"
    "\t - Snapshot of ranks' latest states:\n\t   #{1} started ranks:\n"
)
STARTED = "\t     [{}] started {}\n"


@pytest.mark.parametrize("order", [1, -1], ids=["before its own line", "after it"])
def test_a_desync_report_shows_that_all_have_joined(order: int) -> None:
    place = timeout(2, seq=730).splitlines(keepends=True)[1]
    report = REPORT.format(2, 730, "0, 1, 2, 3") + STARTED.format("0, 1, 2, 3", "ALLREDUCE")
    (only,) = judged("".join([report, place][::order])).findings
    assert (only.rule, only.ranks, only.confidence) == ("all-joined", (0, 1, 2, 3), POSSIBLE)


def test_a_desync_report_gives_the_last_calls_not_those_in_which_ranks_wait() -> None:
    report = REPORT.format(2, 730, "0, 1, 2, 3") + STARTED.format("0, 1, 2, 3", "ALLREDUCE")
    (only,) = judged(timeout(2, seq=700) + timeout(3, seq=700) + report).findings
    assert (only.rule, only.ranks) == ("all-joined", (0, 1, 2, 3))
    assert "sequence number 700" in only.summary


def test_a_desync_report_shows_different_operations() -> None:
    report = REPORT.format(0, 730, "0, 1, 2, 3") + STARTED.format("0, 1, 2", "ALLREDUCE")
    first = judged(report + STARTED.format("3", "BROADCAST")).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (3,))


def test_a_desync_report_of_a_group_of_some_ranks_has_other_numbers() -> None:
    report = REPORT.format(1, 730, "0, 1") + STARTED.format("0, 1", "ALLREDUCE")
    job = read(timeout(9, seq=730, group="4") + report.replace("[rank1]", "[rank9]"))
    assert job is not None and [facts.rank for facts in job.ranks] == [9]


def test_models_that_are_compared_after_a_timeout_are_not_known_to_differ() -> None:
    """The gather was given up, so its result is what was there before."""
    error = "RuntimeError: DDP expects same model across all ranks, but Rank {} has 51 params, while rank {} has "
    error += "inconsistent 0 params."
    raised = "".join(
        prefixed(f"[rank{rank}]: ", TRACEBACK.replace("ValueError: bad label 11", error.format(rank, 1 - rank)))
        for rank in (0, 1)
    )
    gathers = "".join(timeout(rank, 1, "ALLGATHER") for rank in (0, 1))
    assert [one.rule for one in judged("world_size=2\n" + gathers + raised).findings] == ["all-joined"]
    assert judged("world_size=2\n" + raised).findings[0].rule == "mismatched-collective"


def test_a_rank_in_another_back_ends_call_has_not_called_what_the_others_wait_in() -> None:
    dump = (
        "[rank0]:[E810 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to "
        "a collective timeout from  rank 1. Last enqueued NCCL work: 60, last completed NCCL work: 60.\n"
    )
    for error, rule in (
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:57000", "host-stuck"),
        ("KeyboardInterrupt", "rank-behind"),
    ):
        raised = prefixed("[rank0]: ", TRACEBACK.replace("ValueError: bad label 11", error))
        first = judged(timeout(1) + timeout(2) + timeout(3) + dump + raised).findings[0]
        assert (first.rule, first.ranks, first.confidence) == (rule, (0,), POSSIBLE)


def test_a_traceback_whose_beginning_is_missing_is_of_the_same_failure() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.84 GiB."
    library = '  File "/venv/lib/python3.12/site-packages/torch/nn/functional.py", line {}, in cross_entropy\n    x\n'
    head = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in <module>\n    main()\n'
    for line, ranks in ((3504, [(0, 2)]), (77, [(0,), (2,)])):
        cut = prefixed("[rank2]: ", library.format(line) + error)
        whole = prefixed("[rank0]: ", head + library.format(3504) + error)
        found = judged(cut + whole).findings
        assert [(finding.rule, finding.ranks) for finding in found] == [("gpu-memory-exhausted", who) for who in ranks]


def test_an_excerpt_lacks_more_ranks_than_are_late() -> None:
    text, late = "".join(timeout(rank).splitlines()[0] + "\n" for rank in (2, 6, 7)), (0, 1, 3, 4, 5)
    whole = text + "[rank7]:[E x ProcessGroupNCCL.cpp:537] Some NCCL operations have failed or timed out.\n" * 9
    for given, ranks in ((text, ()), ("world_size=8\n" + text, late), (whole, late)):
        first = judged(given).findings[0]
        assert (first.rule, first.ranks, first.confidence) == ("silent-rank", ranks, POSSIBLE)


def test_a_log_cut_off_in_a_traceback_lowers_the_confidence() -> None:
    cut = "".join(TRACEBACK.splitlines(keepends=True)[:5])
    for tail, confidence in ((cut, POSSIBLE), (cut + "KeyboardInterrupt\n", LIKELY)):
        first = judged(timeout(1) + timeout(2) + timeout(3) + tail).findings[0]
        assert (first.rule, first.ranks, first.confidence) == ("silent-rank", (0,), confidence)


@pytest.mark.parametrize("prefix", ["[rank1]: [rank1]: ", "  117  [rank1]: "], ids=["twice", "numbered"])
def test_the_prefix_of_a_rank_may_be_doubled_or_numbered(prefix: str) -> None:
    first = judged(prefixed(prefix, TRACEBACK)).findings[0]
    assert (first.rule, first.ranks) == ("failed-rank", (1,)) and "bad label" in first.summary


def test_of_a_line_that_names_many_ranks_a_limited_number_is_read() -> None:
    culprits = ", ".join(f"Culprit rank {rank}; Error type: SIZE_OR_SYNTAX_MISMATCH" for rank in range(200))
    read_from = [(*said.ranks, said.detail) for said in Statements().read(culprits, None)]
    assert read_from == [(rank, "Error type: SIZE_OR_SYNTAX_MISMATCH") for rank in range(64)]


def test_ranks_are_behind_if_ras_says_twice_that_they_have_launched_less() -> None:
    def asked(least: int, most: int, listed: bool = True, kind: str = "AllReduce", head: bool = True) -> str:
        counts = {f"2 ranks have launched up to operation {least}": (0, 3)}
        counts[f"2 ranks have launched up to operation {most}"] = (1, 2)
        place = "  Rank {0} -- GPU {0} managed by process 7 on node 10.0.0.1\n"
        text = "#0-0 (cf264af53edbe986) MISMATCH\n" * head
        text += f"  Communicator ranks have different {kind} operation counts\n"
        for count, who in counts.items():
            text += f"  {count}\n" + "".join(place.format(rank) for rank in who if listed or rank)
        return text + "\n"

    for log, ranks in (
        (asked(640, 641), ()),
        (asked(640, 641) * 2, (0, 3)),
        (asked(640, 641) + asked(640, 642), ()),
        (asked(640, 641, listed=False) * 2, ()),
        # It has gone on since.
        (asked(640, 641) * 2 + asked(700, 701), ()),
        (asked(12, 13) + asked(640, 641, kind="Broadcast", head=False), ()),
        ((asked(12, 13) + asked(640, 641, kind="Broadcast", head=False)) * 2, (0, 3)),
    ):
        first = judged(log).findings[0]
        assert (first.rule, first.ranks, first.confidence) == ("out-of-step", ranks, LIKELY)
