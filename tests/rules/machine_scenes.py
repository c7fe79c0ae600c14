"""Canonical scenes of causes in host, process, device and network, with facts as real runs gave them."""

from dataclasses import replace
from typing import Any

from builders import (
    ALL_REDUCE,
    BARRIER,
    CREATE_STORE,
    FETCH,
    GLOO,
    INIT_GROUP,
    NCCL,
    NEXT,
    NEXT_DATA,
    TRAINING_STEP,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    transport_error,
    user,
)
from scenes import Scene

from lightning_ncclsafe.facts import (
    COLLECTOR,
    Action,
    EndedProcess,
    Frame,
    GarbageFacts,
    GpuFacts,
    GpuStateFacts,
    HostFacts,
    InterfaceFacts,
    JobFacts,
    LoaderFacts,
    MachineFacts,
    MainThreadFacts,
    Phase,
    PressureFacts,
    ProcessFacts,
    Progress,
    RankFacts,
)

GB = 1_000_000_000
COLLECTS = Frame(file=COLLECTOR, line=0, function="collect")
QUEUE_GET = Frame(file="/usr/lib/python3.12/multiprocessing/queues.py", line=103, function="get")
WRITE = user("dump", 21, code="os.fsync(f.fileno())")
ITEM = user("training_step", 44, code="self.total += loss.item()")
KILLED = "DataLoader worker (pid 4711) is killed by signal: Killed. "
BUS_ERROR = (
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
NO_SPACE = (
    "Caught RuntimeError in DataLoader worker process 0.\nTraceback (most recent call last):\n  …\n"
    "RuntimeError: unable to write to file </torch_68193_2870173103_0>: No space left on device (28)"
)
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. Process 77 has 77.90 GiB memory in use."
)
EXABYTE = "CUDA out of memory. Tried to allocate more than 1EB memory."


def with_machine(facts: RankFacts, **machine: Any) -> RankFacts:
    """The same rank with these facts about its machine."""
    return replace(facts, machine=MachineFacts(**machine))


def without_answer(net: Backend, seen: ProcessFacts) -> JobFacts:
    """Rank 2 does not answer; a neighbour looks at its process."""
    return job(*(net.waiting(rank, seq=61) for rank in (0, 1, 3)), witnessed=(seen,))


def late(net: Backend, culprit: RankFacts) -> JobFacts:
    """All others wait for rank 2."""
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def at_work(net: Backend, *stack: Frame, **machine: Any) -> JobFacts:
    """All others wait for rank 2, which is in training_step."""
    frames = stack or (user("training_step", 40),)
    return late(net, with_machine(net.working(2, *frames, seq=60, action=TRAINING_STEP), **machine))


def failed(net: Backend, type_: str, message: str, **machine: Any) -> JobFacts:
    """Rank 2 raised in training_step."""
    culprit = raised(net.working(2, seq=60), type_, message, user("training_step", 42))
    return late(net, with_machine(culprit, **machine))


def stopped_by_a_debugger(net: Backend) -> JobFacts:
    return without_answer(net, process(2, "tracing-stop"))


def paused_container(net: Backend) -> JobFacts:
    """Its control group is frozen: cgroup v1 shows that as uninterruptible sleep."""
    return without_answer(net, process(2, "disk-sleep", wait_channel="__refrigerator"))


def native_code_waits_with_the_gil(net: Backend) -> JobFacts:
    """A lock that ctypes.PyDLL waits for: it sleeps, and its guard's thread rests."""
    seen = process(2, "sleeping", gil_held=True, stack=(user("gilsleep", 15),), ran_share=0.0, queued_share=0.0)
    return without_answer(net, seen)


def native_code_that_has_let_go_since(net: Backend) -> JobFacts:
    """The signal that asked for its stack has ended a sleep() in C; what it has answered then is of a later moment."""
    seen = process(2, "sleeping", gil_held=True, stack=(user("gilsleep", 15),), ran_share=0.0, queued_share=0.0)
    return job(*(net.waiting(rank, seq=61) for rank in range(4)), witnessed=(seen,))


def collects_garbage(net: Backend) -> JobFacts:
    """Seen from outside: it cannot answer before the collection is over."""
    stack = (user("training_step", 40), COLLECTS)
    return without_answer(net, process(2, "running", gil_held=True, stack=stack, ran_share=0.98, queued_share=0.02))


def collected_garbage(net: Backend) -> JobFacts:
    """It answers, as the collection has just ended."""
    garbage = GarbageFacts(longest_s=19.0, ended_ago_s=0.4, total_s=38.0, count=2, blocks=60_000_000)
    return at_work(net, garbage=garbage)


def page_fault_on_a_dead_mount(net: Backend) -> JobFacts:
    """A memory-mapped file: the fault keeps the GIL, so that nobody answers."""
    return without_answer(net, process(2, "disk-sleep", wait_channel="rpc_wait_bit_killable"))


def thread(**more: Any) -> MainThreadFacts:
    return MainThreadFacts(**({"over_s": 20.0, "looks": 11, "state": "sleeping"} | more))


def fsync_hangs(net: Backend) -> JobFacts:
    """As with a frozen file system."""
    blocked = thread(state="disk-sleep", wait_channel="percpu_rwsem_wait", blocked_looks=10, ran_s=0.1, queued_s=0.1)
    return at_work(net, user("training_step", 40), WRITE, main_thread=blocked)


def fifo_without_a_reader(net: Backend) -> JobFacts:
    line = user("training_step", 40, code="pipe = open(path, 'w')")
    return at_work(net, line, main_thread=thread(wait_channel="wait_for_partner"))


def starved_of_cores(net: Backend) -> JobFacts:
    """Twelve busy processes on the one core that it may run on."""
    seen = thread(state="running", ran_s=1.6, queued_s=18.2, preempted=402, major_faults=0)
    facts = at_work(net, main_thread=seen, pressure=PressureFacts(over_s=20.0, cpu_waited=0.97))
    return replace(
        facts, ranks=tuple(replace(one, host_facts=HostFacts(load_1min=14.0, cores=1)) for one in facts.ranks)
    )


def throttled_by_a_quota(net: Backend) -> JobFacts:
    """docker --cpus, too low."""
    pressure = PressureFacts(over_s=20.0, periods=201, throttled_periods=199, throttled_s=19.1)
    return at_work(net, main_thread=thread(state="running", ran_s=0.8, queued_s=0.3), pressure=pressure)


def too_starved_to_answer(net: Backend) -> JobFacts:
    seen = process(2, "running", gil_held=True, stack=(user("slow", 90),), ran_share=0.04, queued_share=0.01)
    return without_answer(net, seen)


def swapped_out(net: Backend) -> JobFacts:
    """It answers; its host swaps."""
    facts = at_work(
        net,
        main_thread=thread(
            state="disk-sleep", wait_channel="folio_wait_bit_common", blocked_looks=9, major_faults=90_000
        ),
        pressure=PressureFacts(over_s=20.0, memory_stalled=0.71),
    )
    memory = HostFacts(rss_bytes=20 * GB, process_swap_bytes=9 * GB, swapped_in_bytes=3 * GB)
    return replace(facts, ranks=tuple(replace(one, host_facts=memory) for one in facts.ranks))


def worker_is_killed(net: Backend) -> JobFacts:
    facts = failed(net, "RuntimeError", KILLED)
    killed = replace(facts.ranks[2], host_facts=HostFacts(oom_kills=1), loaders=(LoaderFacts(dataset="Digits"),))
    return replace(facts, ranks=(*facts.ranks[:2], killed, facts.ranks[3]))


def queue_that_nobody_fills(net: Backend) -> JobFacts:
    """The user's own process, killed; nobody looks whether it is still there."""
    ended = (EndedProcess(pid=4711, signal="SIGKILL"),)
    return at_work(net, user("training_step", 40, code="batch = queue.get()"), QUEUE_GET, ended=ended)


def pool_that_a_dataset_asks(net: Backend) -> JobFacts:
    """A dataset that is read on the training thread asks a process of its own."""
    line = user("__getitem__", 12, code="return self.pool.get()")
    culprit = net.working(2, NEXT_DATA, FETCH, line, QUEUE_GET, seq=60, action=NEXT)
    return late(net, with_machine(culprit, ended=(EndedProcess(pid=4711, signal="SIGSEGV"),)))


def worker_dies_of_a_bus_error(net: Backend) -> JobFacts:
    return failed(net, "RuntimeError", BUS_ERROR, shm_total_bytes=64_000_000, shm_free_bytes=30_000_000)


def no_space_in_shared_memory(net: Backend) -> JobFacts:
    return failed(net, "RuntimeError", NO_SPACE)


def gpu_of(free: int = 40 * GB, **more: Any) -> GpuStateFacts:
    return GpuStateFacts(gpu=GpuFacts(index=0, name="H100", total_bytes=80 * GB, free_bytes=free, **more))


def out_of_gpu_memory(_: Backend) -> JobFacts:
    return failed(NCCL, "OutOfMemoryError", CUDA_OOM, gpu=gpu_of(GB))


def on_nccl(started: dict[int, bool], completed: dict[int, bool], **machine: dict[int, Any]) -> JobFacts:
    """All four ranks have called number 63; the device has started or ended it on some of them."""
    ranks = []
    for rank in range(4):
        facts = NCCL.rank(rank, ITEM, seq=63, outstanding=1)
        last = replace(facts.collectives[-1], started=started.get(rank, True), completed=completed.get(rank, False))
        facts = replace(facts, collectives=(*facts.collectives[:-1], last))
        ranks.append(with_machine(facts, **{name: by[rank] for name, by in machine.items() if rank in by}))
    return job(*ranks)


def not_started_on_one_gpu(_: Backend) -> JobFacts:
    return on_nccl({2: False}, {})


def not_ended_on_one_gpu(_: Backend) -> JobFacts:
    return on_nccl({}, {0: True, 1: True, 3: True})


def gpu_whose_driver_is_silent(_: Backend) -> JobFacts:
    return on_nccl({}, {}, gpu={2: GpuStateFacts(no_answer_s=4.0)})


def sync_with_a_broken_gpu(_: Backend) -> JobFacts:
    """Nothing of NCCL's is outstanding on it: a kernel of the step does not end."""
    return at_work(NCCL, ITEM, gpu=gpu_of(xids=("79 (fallen off the bus)",)))


def first_collective_of_all_gpus(_: Backend) -> JobFacts:
    """Nothing has ever ended on NCCL."""
    ranks = []
    for rank in range(4):
        facts = NCCL.rank(rank, BARRIER, seq=1, outstanding=1, phase=Phase.INIT, batch=-1)
        ranks.append(replace(facts, collectives=(replace(facts.collectives[-1], started=True),)))
    return job(*ranks)


def interface(rank: int, name: str, address: str, network: str = "", **more: Any) -> InterfaceFacts:
    return InterfaceFacts(backend="gloo", name=name, address=address, network=network, **more)


def on_two_hosts(*ranks: RankFacts) -> tuple[RankFacts, ...]:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    return tuple(replace(facts, host=f"node-{1 + facts.rank // 2}", local_rank=facts.rank % 2) for facts in ranks)


def link_fails_for_a_moment(net: Backend) -> JobFacts:
    """Ranks 0 and 1 lose their connections to the other host, whose ranks wait on."""
    ranks = []
    for facts in on_two_hosts(*(net.waiting(rank, seq=61) for rank in range(4))):
        address = f"10.0.0.{1 + facts.rank // 2}"
        facts = with_machine(facts, interface=interface(facts.rank, "eth0", address, "10.0.0.0/24"))
        if facts.rank < 2:
            facts = transport_error(facts)
            message = "[gloo/transport/tcp/pair.cc:547] Connection reset by peer [10.0.0.2]:31337"
            facts = raised(facts, "RuntimeError", message, ALL_REDUCE, consequence=True)
        ranks.append(facts)
    return job(*ranks)


def bridges_of_docker(_: Backend) -> JobFacts:
    """Both hosts take docker0, which has the same address on both."""
    ranks = []
    for facts in on_two_hosts(*(GLOO.in_barrier(n, "x", seq=1, phase=Phase.INIT, batch=-1) for n in range(4))):
        taken = interface(
            facts.rank,
            "docker0",
            "172.17.0.1",
            "172.17.0.0/16",
            chosen_by="first that is up",
            others=(f"eth0 10.0.0.{facts.rank // 2}",),
        )
        ranks.append(with_machine(facts, interface=taken))
    return job(*ranks)


def loopback_between_hosts(_: Backend) -> JobFacts:
    """The ranks of one host wait in init_process_group; of the others nothing is known."""
    ranks = []
    for rank in (0, 1):
        progress = Progress(phase=Phase.INIT, actions=(Action(name="init_process_group", for_s=30),), idle_s=30)
        facts = RankFacts(rank=rank, local_rank=rank, host="node-1", progress=progress, stack=(INIT_GROUP,))
        ranks.append(with_machine(facts, interface=interface(rank, "lo", "127.0.1.1", is_loopback=True)))
    return job(*ranks)


def name_server_without_an_answer(_: Backend) -> JobFacts:
    """Rank 0 has the store and waits in init_process_group; the others are still in the constructor of theirs."""
    ranks = []
    for rank in range(3):
        progress = Progress(phase=Phase.INIT, actions=(Action(name="init_process_group", for_s=4),), idle_s=4)
        facts = RankFacts(
            rank=rank, local_rank=rank, host="node-1", progress=progress, stack=(INIT_GROUP, CREATE_STORE)
        )
        ranks.append(with_machine(facts, name_servers=("10.0.0.53",)) if rank else replace(facts, stack=(INIT_GROUP,)))
    return job(*ranks)


def driver_waits(_: Backend) -> JobFacts:
    """It hangs in a call to the GPU's driver, with the GIL."""
    return without_answer(NCCL, process(2, "disk-sleep", wait_channel="uvm_gpu_wait"))


CALL = f"{USER_FILE}:40 in training_step"
RAISED = f"{USER_FILE}:42 in training_step"
SYNC = f"{USER_FILE}:44 in training_step"

MACHINE_SCENES = (
    Scene("stopped by a debugger", stopped_by_a_debugger, "stopped-process", (2,)),
    Scene("paused container", paused_container, "stopped-process", (2,)),
    Scene("waits with the GIL", native_code_waits_with_the_gil, "gil-held", (2,), f"{USER_FILE}:15 in gilsleep"),
    Scene(
        "kept the GIL until it was asked",
        native_code_that_has_let_go_since,
        "gil-held",
        (2,),
        f"{USER_FILE}:15 in gilsleep",
    ),
    Scene("collects garbage", collects_garbage, "gc-pause", (2,), CALL),
    Scene("collected garbage", collected_garbage, "gc-pause", (2,), CALL),
    Scene("page fault on a dead mount", page_fault_on_a_dead_mount, "blocked-on-disk", (2,)),
    Scene("fsync hangs", fsync_hangs, "blocked-on-disk", (2,), f"{USER_FILE}:21 in dump"),
    Scene("FIFO without a reader", fifo_without_a_reader, "blocked-on-disk", (2,), CALL),
    Scene("starved of cores", starved_of_cores, "host-starved", (2,), CALL),
    Scene("throttled by a quota", throttled_by_a_quota, "host-starved", (2,), CALL),
    Scene("too starved to answer", too_starved_to_answer, "host-starved", (2,), f"{USER_FILE}:90 in slow"),
    Scene("swapped out", swapped_out, "host-starved", (2,), CALL),
    Scene("worker is killed", worker_is_killed, "worker-died", (2,)),
    Scene("queue that nobody fills", queue_that_nobody_fills, "worker-died", (2,), CALL),
    Scene("worker dies of a bus error", worker_dies_of_a_bus_error, "shm-exhausted", (2,)),
    Scene("no space in shared memory", no_space_in_shared_memory, "shm-exhausted", (2,)),
    Scene("out of GPU memory", out_of_gpu_memory, "gpu-memory-exhausted", (2,), RAISED),
    Scene("not started on one GPU", not_started_on_one_gpu, "gpu-stuck", (2,), SYNC),
    Scene("not ended on one GPU", not_ended_on_one_gpu, "gpu-stuck", (2,), SYNC),
    Scene("GPU whose driver is silent", gpu_whose_driver_is_silent, "gpu-stuck", (2,), SYNC),
    Scene("sync with a broken GPU", sync_with_a_broken_gpu, "gpu-stuck", (2,), SYNC),
    Scene("driver waits", driver_waits, "gpu-stuck", (2,)),
    Scene("first collective of all GPUs", first_collective_of_all_gpus, "p2p-blocked", (0, 1, 2, 3)),
    Scene("link fails for a moment", link_fails_for_a_moment, "network-cut", (2, 3)),
    Scene("bridges of Docker", bridges_of_docker, "wrong-interface", (0, 1, 2, 3)),
    Scene("name server without an answer", name_server_without_an_answer, "slow-name-server", (1, 2)),
    Scene("loopback between hosts", loopback_between_hosts, "wrong-interface", (0, 1)),
)
