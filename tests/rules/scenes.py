"""One canonical scene per cause, on either back end, with the answer that the judge has to give first."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from builders import (
    AGREEMENT_WAIT,
    ALL_REDUCE,
    BARRIER,
    CHECKPOINT_IO,
    CONDITION_WAIT,
    EPOCH_END,
    FETCH,
    FLUSH,
    INFINITE,
    INIT_GROUP,
    NEXT,
    NEXT_DATA,
    OFFLOAD_PUT,
    OWN_WAIT,
    QUEUE_GET,
    RANK_ZERO,
    SUBPROCESS_WAIT,
    SUMMARY_WRITER,
    TEARDOWN,
    TENSORBOARD,
    TORCH_SAVE,
    TRAINING_STEP,
    TRY_GET,
    USER_FILE,
    Backend,
    job,
    process,
    raised,
    transport_error,
    user,
)

from lightning_ncclsafe.facts import (
    Action,
    FileLockFacts,
    Frame,
    HostFacts,
    JobFacts,
    LoaderFacts,
    LockHolder,
    LoggerFacts,
    LoopEnd,
    MachineFacts,
    MainThreadFacts,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    SilentHost,
    StepFacts,
    StorageFacts,
    TrainerFacts,
)
from lightning_ncclsafe.facts.wording import location_of

EVALUATE = user("evaluate", 73, condition="if self.trainer.is_global_zero:  (line 70)", code="self.score(image)")


@dataclass(frozen=True)
class Scene:
    """What happened, and what has to be found."""

    name: str
    build: Callable[[Backend], JobFacts]
    rule: str
    ranks: tuple[int, ...]
    location: str = ""


def rank_zero_evaluates(net: Backend) -> JobFacts:
    """The OpenCLIP case: rank 0 evaluates at the end of the epoch, the others have begun the next one."""
    culprit = net.working(
        0, user("on_train_epoch_end", 70), EVALUATE, seq=60, action=EPOCH_END, batch=23, last=True, idle=612
    )
    others = (net.in_sigterm_broadcast(rank, seq=61, epoch=1, batch=0) for rank in (1, 2, 3))
    return job(culprit, *others)


def rank_zero_evaluates_through_a_loader(net: Backend) -> JobFacts:
    """The same, caught while rank 0 reads its own validation set."""
    stack = (user("on_train_epoch_end", 70), EVALUATE, NEXT_DATA, FETCH, user("__getitem__", 12))
    culprit = net.working(0, *stack, seq=60, action=EPOCH_END, batch=23, last=True)
    return job(culprit, *(net.in_sigterm_broadcast(rank, seq=61, epoch=1, batch=0) for rank in (1, 2, 3)))


def rank_zero_evaluates_before_it_presents_its_loaders(net: Backend) -> JobFacts:
    """Rank 0 evaluates in a hook of its own; the others wait for it in the comparison of the loaders."""
    culprit = net.working(0, user("on_train_epoch_end", 70), EVALUATE, seq=60, action=EPOCH_END, batch=23, last=True)
    options = {"action": "agreement:train_dataloader", "epoch": 1, "batch": -1}
    others = (net.rank(rank, *AGREEMENT_WAIT, seq=60, **options) for rank in (1, 2, 3))  # type: ignore[arg-type]
    return job(culprit, *others)


def decorated_callback(net: Backend) -> JobFacts:
    """@rank_zero_only on a callback's hook; no condition in sight."""
    stack = (RANK_ZERO, user("on_train_batch_end", 31))
    culprit = net.working(0, *stack, seq=60, action="[Callback]Images.on_train_batch_end")
    return job(culprit, *(net.waiting(rank, seq=61) for rank in (1, 2, 3)))


def in_hook_that_others_left(net: Backend, late: int, **options: object) -> JobFacts:
    line = user("on_validation_epoch_end", 55)
    given: dict[str, object] = {"action": EPOCH_END, "phase": Phase.VALIDATE, **options}
    culprit = net.working(late, line, seq=60, **given)  # type: ignore[arg-type]
    return job(*(culprit if rank == late else net.in_sigterm_broadcast(rank, seq=61, epoch=1) for rank in range(4)))


def hook_that_others_left(net: Backend) -> JobFacts:
    """Rank 0 in a hook that the others have left; nothing says that it is on purpose."""
    return in_hook_that_others_left(net, 0)


def hook_that_holds_a_rank(net: Backend) -> JobFacts:
    """Another rank there: all ranks go through that hook, and nothing says that these have skipped what holds it."""
    return in_hook_that_others_left(net, 2)


def callback_of_a_batch_that_holds_a_rank(net: Backend) -> JobFacts:
    """What is called after each batch is no work that one rank does for all."""
    return in_hook_that_others_left(net, 0, action="[Callback]Bars.on_train_batch_end", phase=Phase.TRAIN)


def loaders_that_one_rank_makes_for_long(net: Backend) -> JobFacts:
    """All ranks make theirs; a lock holds this one before its first batch."""
    line, options = user("train_dataloader", 21), {"phase": Phase.TRAIN, "batch": -1}
    hook = "[LightningDataModule]Data.train_dataloader"
    culprit = net.working(1, line, seq=9, action=hook, **options)  # type: ignore[arg-type]
    at_start = replace(culprit.progress, global_step=0)
    others = (net.in_barrier(rank, "train_dataloader()", seq=10, **options) for rank in (0, 2, 3))
    return job(replace(culprit, progress=at_start), *others)


def ranks_that_wait_for_a_file_of_rank_zero(net: Backend) -> JobFacts:
    """All but rank 0 are in the other branch of the condition: what they wait for never comes."""
    line = user("setup", 30, condition="else of if self.trainer.is_global_zero:  (line 27)")
    options = {"phase": Phase.INIT, "batch": -1}
    late = (
        net.working(rank, line, seq=1, action="[LightningDataModule]Data.setup", **options)  # type: ignore[arg-type]
        for rank in (1, 2, 3)
    )
    return job(net.in_barrier(0, "post_setup", seq=2, **options), *late)  # type: ignore[arg-type]


def rank_zero_tokenises_in_setup(net: Backend) -> JobFacts:
    """Before the first batch, under a condition: the condition is the more useful answer."""
    line = user("setup", 18, condition="if self.trainer.is_global_zero:  (line 17)")
    culprit = net.working(0, line, seq=1, phase=Phase.INIT, action="[LightningDataModule]Data.setup", batch=-1)
    options = {"phase": Phase.INIT, "batch": -1}
    return job(culprit, *(net.in_barrier(rank, "post_setup", seq=2, **options) for rank in (1, 2, 3)))


def holds_a_lock_into_a_barrier(net: Backend) -> JobFacts:
    """Rank 1 waits for the lock that rank 0 holds, and rank 0 for rank 1, in a barrier."""
    options = {"phase": Phase.INIT, "batch": -1}
    lock = FileLockFacts(path="/cache/x.lock", holders=(LockHolder(pid=1000, command="python train.py"),))
    waiting = net.working(1, user("fetch", 12, code="fcntl.flock(file, fcntl.LOCK_EX)"), seq=1, **options)
    others = (net.in_barrier(rank, "cached", seq=2, **options) for rank in (0, 2, 3))
    return job(replace(waiting, file_lock=lock), *others)


def late_in_setup(net: Backend) -> JobFacts:
    """The RecBole case: rank 5's peers wait in DDP's parameter check while its host swaps."""
    line = user("setup", 18, code="table = read_everything(path)")
    culprit = net.working(0, line, seq=1, phase=Phase.INIT, action="[LightningDataModule]Data.setup", batch=-1)
    memory = HostFacts(rss_bytes=61_000_000_000, process_swap_bytes=12_300_000_000, swapped_in_bytes=900_000_000)
    options = {"phase": Phase.INIT, "batch": -1}
    others = (net.in_barrier(rank, "post_setup", seq=2, **options) for rank in (1, 2, 3))
    return job(replace(culprit, host_facts=memory), *others)


def one_rank_skips_validation(net: Backend) -> JobFacts:
    """Rank 2 has no validation loader; it has gone on to the next barrier, the others wait for its loader."""
    options = {"phase": Phase.INIT, "batch": -1}
    presenting = (
        net.rank(rank, *AGREEMENT_WAIT, seq=6, action="agreement:val_dataloader", **options)  # type: ignore[arg-type]
        for rank in (0, 1, 3)
    )
    return job(*presenting, net.in_barrier(2, "train_dataloader()", seq=7, **options))


def one_rank_estimates_steps_under_a_condition(net: Backend) -> JobFacts:
    """The same, where the source says that only rank 0 comes there."""
    facts = one_rank_estimates_steps(net)
    first, *others = facts.ranks
    condition = "if self.global_rank == 0:  (line 32)"
    stack = (replace(frame, rank_condition=condition) if frame.user else frame for frame in first.stack)
    return replace(facts, ranks=(replace(first, stack=tuple(stack)), *others))


def barrier_in_prepare_data(net: Backend) -> JobFacts:
    """Lightning calls prepare_data on rank 0 alone; rank 1 is in the barrier that follows it."""
    options = {"phase": Phase.INIT, "batch": -1, "world": 2}
    culprit = net.rank(0, user("prepare_data", 20), BARRIER, seq=3, outstanding=1, op="barrier", sizes=(), **options)  # type: ignore[arg-type]
    actions = (Action(name="[LightningModule]Net.prepare_data", for_s=23.0), Action(name="barrier:data", for_s=23.0))
    culprit = replace(culprit, progress=replace(culprit.progress, actions=actions))
    return job(culprit, net.rank(1, INFINITE, seq=2, **options), world=2)  # type: ignore[arg-type]


def trainer_called_on_one_rank(net: Backend) -> JobFacts:
    """Rank 1 has left fit and waits in a barrier of the program's, where no guard of ours answers."""
    condition = "if trainer.is_global_zero: trainer.test(model)  (line 201)"
    called = user("main", 201, condition=condition)
    options = {"phase": Phase.INIT, "batch": -1, "world": 2}
    alone = net.in_barrier(0, "pre_setup", seq=61, **options)
    alone = replace(alone, stack=(called, *(frame for frame in alone.stack if not frame.user)))
    return job(alone, world=2, witnessed=(process(1, "sleeping"),))


def one_rank_estimates_steps(net: Backend) -> JobFacts:
    """Rank 0 alone asks Lightning how many steps there will be, for which Lightning makes the training's loader."""
    options = {"phase": Phase.INIT, "batch": -1}
    line = user("configure_optimizers", 33, code="steps = self.trainer.estimated_stepping_batches")
    alone = net.rank(0, line, *AGREEMENT_WAIT, seq=6, action="agreement:train_dataloader", **options)  # type: ignore[arg-type]
    return job(alone, *(net.in_barrier(rank, "run-stage", seq=7, **options) for rank in (1, 2, 3)))


def _in_init(rank: int) -> RankFacts:
    progress = Progress(phase=Phase.INIT, actions=(Action(name="init_process_group", for_s=30),), idle_s=30)
    return RankFacts(rank=rank, progress=progress, stack=(INIT_GROUP,))


def not_yet_joined(net: Backend) -> JobFacts:
    """Rank 3 has not even created its Trainer; its neighbours see its process."""
    seen = process(3, "running", rss_bytes=10_000_000_000, stack=(user("main", 9),))
    return job(*(_in_init(rank) for rank in range(3)), witnessed=(seen,))


def not_yet_joined_in_disk_sleep(net: Backend) -> JobFacts:
    """The same while it swaps: uninterruptible sleep is what swapping looks like, not a cause of its own."""
    return job(*(_in_init(rank) for rank in range(3)), witnessed=(process(3, "disk-sleep", swap_bytes=4_000_000_000),))


def short_rank_finished(net: Backend) -> JobFacts:
    """The Llama-recipes case: rank 1 has run out of data and is done."""
    short = replace(net.finished(1, seq=60, batch=19), loaders=(LoaderFacts(batches=20),))
    long = (replace(net.waiting(rank, seq=61, batch=20), loaders=(LoaderFacts(batches=22),)) for rank in (0, 2, 3))
    ranks = {facts.rank: facts for facts in (short, *long)}
    return job(*(ranks[rank] for rank in range(4)))


def short_rank_in_validation(net: Backend) -> JobFacts:
    """Rank 1 waits in a reduction at the end of validation, under the number of the others' gradients."""
    short = net.rank(1, ALL_REDUCE, seq=61, outstanding=1, sizes=ONE_VALUE, phase=Phase.VALIDATE, batch=5, last=True)
    return job(*(short if rank == 1 else net.waiting(rank, seq=61, batch=20) for rank in range(4)))


ONE_VALUE = ((1,),)


SETTINGS = {"max_steps": "-1", "accumulate_grad_batches": "1", "first epoch": "0"}


def trained(facts: RankFacts, end: LoopEnd = LoopEnd.UNKNOWN, *, begun: int = 21, **settings: str) -> RankFacts:
    told = TrainerFacts(settings={**SETTINGS, **settings}, end=end, batches_begun=begun, batches=40)
    return replace(facts, trainer=told)


def should_stop_on_one_rank(net: Backend) -> JobFacts:
    """Rank 1 validates before it ends, as its should_stop says; no loader is shorter than another."""
    early = net.rank(1, ALL_REDUCE, seq=61, outstanding=1, sizes=ONE_VALUE, phase=Phase.VALIDATE, batch=39, last=True)
    early = trained(early, LoopEnd.SHOULD_STOP, begun=20)
    assert early.trainer is not None
    early = replace(early, trainer=replace(early.trainer, ended_at=(f"{USER_FILE}:70 in training_step",)))
    return job(*(early if rank == 1 else trained(net.waiting(rank, seq=61, batch=20)) for rank in range(4)))


def one_rank_validates_by_its_clock(net: Backend) -> JobFacts:
    early = net.rank(1, ALL_REDUCE, seq=61, outstanding=1, sizes=ONE_VALUE, phase=Phase.VALIDATE, batch=39, last=True)
    ranks = [early if rank == 1 else net.waiting(rank, seq=61, batch=20) for rank in range(4)]
    told = TrainerFacts(settings={"val_check_interval": "3600 s"}, validates_by_clock=True, batches=40)
    return job(*(replace(facts, trainer=told) for facts in ranks))


def one_rank_validates_within_its_epoch(net: Backend) -> JobFacts:
    """Something has set its val_check_batch; the others' epochs are as long, and go on."""
    early = net.rank(1, ALL_REDUCE, seq=61, outstanding=1, sizes=ONE_VALUE, phase=Phase.VALIDATE, batch=3, last=True)
    early = trained(early, begun=20)
    assert early.trainer is not None
    early = replace(early, trainer=replace(early.trainer, ended_at=(f"{USER_FILE}:64 in on_train_start",)))
    return job(*(early if rank == 1 else trained(net.waiting(rank, seq=61, batch=20)) for rank in range(4)))


def a_stop_iteration_left_a_hook(net: Backend) -> JobFacts:
    """Its batch counts as one without a backward pass, too."""
    early = trained(net.finished(1, seq=60, batch=19), begun=20)
    early = replace(early, steps=StepFacts(with_backward=19, skipped=1, skipped_epoch=0, skipped_batch=19))
    others = {rank: trained(net.waiting(rank, seq=61, batch=20)) for rank in (0, 2, 3)}
    others = {rank: replace(facts, steps=StepFacts(with_backward=21)) for rank, facts in others.items()}
    return job(*(({1: early} | others)[rank] for rank in range(4)))


def more_optimizer_steps_on_one_rank(net: Backend) -> JobFacts:
    early = trained(net.finished(1, seq=60, batch=19), LoopEnd.MAX_STEPS, begun=20, max_steps="20")
    return job(
        *(early if rank == 1 else trained(net.waiting(rank, seq=61, batch=20), max_steps="20") for rank in range(4))
    )


def an_optimizer_step_left_out_on_one_rank(net: Backend) -> JobFacts:
    """The others have made one more, reach max_steps before it, and leave."""
    done = StepFacts(with_backward=20, passes=((0, 0, 1, 0, 1),), passes_epoch=0, passes_batch=19)
    others = {rank: trained(net.finished(rank, seq=60, batch=19), LoopEnd.MAX_STEPS, begun=20) for rank in (0, 2, 3)}
    passes = ((0, 0, 1, 0, 1), (0, 7, 1), (0, 8, 1, 0, 1))
    skips = (f"{USER_FILE}:70 in training_step",)
    less = replace(done, passes=passes, skips_steps=skips, with_backward=21, under_way=(0, 20, 1))
    late = replace(trained(net.waiting(1, seq=61, batch=20)), steps=less)
    return job(late, *(replace(facts, steps=done) for facts in others.values()))


def another_accumulation_on_one_rank(net: Backend) -> JobFacts:
    """Rank 1 has left the backward pass in which the others wait: it has reduced nothing there."""
    odd = trained(net.finished(1, seq=60, batch=39), LoopEnd.DATA, begun=40, accumulate_grad_batches="2")
    odd = replace(odd, steps=StepFacts(with_backward=40, without_gradient=("net.0",), without_gradient_count=1))
    others = {rank: trained(net.waiting(rank, seq=61, batch=20)) for rank in (0, 2, 3)}
    others = {rank: replace(facts, steps=StepFacts(with_backward=21)) for rank, facts in others.items()}
    return job(*(({1: odd} | others)[rank] for rank in range(4)))


def two_ranks_resumed_elsewhere(net: Backend) -> JobFacts:
    """In other epochs, though none has run out of data."""
    ranks = [trained(net.waiting(rank, seq=61, batch=20), **{"first epoch": str(3 * (rank > 1))}) for rank in range(4)]
    later = [replace(one, progress=replace(one.progress, epoch=3)) if one.rank > 1 else one for one in ranks]
    return job(*later)


def short_rank_broke_the_connection(net: Backend) -> JobFacts:
    """The others were told that a peer is gone, which is only the consequence."""
    short = net.finished(1, seq=60, batch=19)
    ranks = {1: short} | {rank: transport_error(net.waiting(rank, seq=61, batch=20)) for rank in (0, 2, 3)}
    return job(*(ranks[rank] for rank in range(4)))


def logger_flushes(net: Backend) -> JobFacts:
    """The torchtitan case: rank 0 joins TensorBoard's queue; Lightning's logger is rank-zero-only by itself."""
    culprit = net.working(0, RANK_ZERO, TENSORBOARD, SUMMARY_WRITER, FLUSH, seq=60, idle=23)
    storage = (StorageFacts(owner="TensorBoardLogger", path="/mnt/logs", filesystem="nfs4"),)
    others = (net.in_sigterm_broadcast(rank, seq=61, batch=12) for rank in (1, 2, 3))
    return job(replace(culprit, storage=storage), *others)


def offloaded_logger_blocks(net: Backend) -> JobFacts:
    """The same with LoggerOffload(overflow="block"), whose limits are used up: its threads wait for the storage."""
    culprit = net.working(0, *OFFLOAD_PUT, seq=60, idle=9)
    offloaded = LoggerFacts(
        logger="TensorBoardLogger", path="/mnt/logs", staged_bytes=1_073_000_000, writing_s=41.0, waited_s=9.0
    )
    others = (net.in_sigterm_broadcast(rank, seq=61, batch=12) for rank in (1, 2, 3))
    return job(replace(culprit, loggers=(offloaded,)), *others)


def logger_called_under_a_condition(net: Backend) -> JobFacts:
    """The user's own condition around a logger's call: the logger is the cause, not that one rank logs."""
    line = user("training_step", 44, condition="if self.trainer.is_global_zero:  (line 43)")
    culprit = net.working(0, line, TENSORBOARD, FLUSH, seq=60, action=TRAINING_STEP)
    return job(culprit, *(net.waiting(rank, seq=61) for rank in (1, 2, 3)))


def checkpoint_is_written(net: Backend) -> JobFacts:
    """Rank 0 writes, the others wait at Lightning's barrier behind the save."""
    culprit = net.working(0, CHECKPOINT_IO, TORCH_SAVE, seq=60, phase=Phase.CHECKPOINT, action="save_checkpoint")
    storage = (StorageFacts(owner="ModelCheckpoint", path="/mnt/ckpt", filesystem="nfs4"),)
    options = {"phase": Phase.CHECKPOINT}
    others = (net.in_barrier(rank, "Trainer.save_checkpoint", seq=61, **options) for rank in (1, 2, 3))
    return job(replace(culprit, storage=storage), *others)


def loader_workers_stall(net: Backend) -> JobFacts:
    """The Wenet case: rank 2 waits for its workers, which sleep in storage."""
    worker = ProcessFacts(pid=77, state="disk-sleep", wait_channel="nfs_wait_bit_killable", stack=(user("read", 8),))
    culprit = net.working(2, NEXT_DATA, TRY_GET, seq=60, action=NEXT)
    loaders = (LoaderFacts(dataset="Digits", num_workers=2, prefetch_factor=250),)
    culprit = replace(culprit, workers=(worker, worker), loaders=loaders)
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def loader_stalls_without_workers(net: Backend) -> JobFacts:
    """The user's __getitem__ on the main thread."""
    culprit = net.working(2, NEXT_DATA, FETCH, user("__getitem__", 12), seq=60, action=NEXT)
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def all_loaders_stall(net: Backend) -> JobFacts:
    """Shared storage is down: nobody waits for anybody."""
    return job(*(net.working(rank, NEXT_DATA, TRY_GET, seq=60, action=NEXT) for rank in range(4)))


def one_rank_fails(net: Backend) -> JobFacts:
    """Rank 3 raised in the user's training_step."""
    culprit = raised(net.working(3, seq=60), "ValueError", "bad label 11", user("training_step", 42))
    return job(*(net.waiting(rank, seq=61) for rank in range(3)), culprit)


def one_rank_fails_and_breaks_connections(net: Backend) -> JobFacts:
    """The same, seen after the others were told that the connection is closed."""
    culprit = raised(net.working(3, seq=60), "ValueError", "bad label 11", user("training_step", 42))
    return job(*(transport_error(net.waiting(rank, seq=61)) for rank in range(3)), culprit)


def one_rank_was_killed(net: Backend) -> JobFacts:
    """Rank 1 is gone, and the kernel's counter on its host rose."""
    seen = replace(net.waiting(0, seq=61), host_facts=HostFacts(oom_kills=1), peers=(process(1, "gone"),))
    return job(seen, net.waiting(2, seq=61), net.waiting(3, seq=61))


def one_rank_gone_unseen(net: Backend) -> JobFacts:
    """Nobody shares its host, but all connections to it broke."""
    return job(*(transport_error(net.waiting(rank, seq=61)) for rank in (0, 2, 3)))


def one_rank_skips_a_step(net: Backend) -> JobFacts:
    """Rank 1's training_step returned None: it is in the next batch's broadcast under the number of the gradients."""
    culprit = net.in_sigterm_broadcast(1, seq=61, batch=12)
    return job(*(culprit if rank == 1 else net.waiting(rank, seq=61) for rank in range(4)))


def collective_under_a_condition(net: Backend) -> JobFacts:
    """Two ranks; rank 0 alone computes a metric that gathers. Neither is in the majority."""
    line = user("on_train_epoch_end", 50, condition="if self.trainer.is_global_zero:  (line 49)")
    culprit = net.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((10,),), action=EPOCH_END, last=True, world=2)
    return job(culprit, net.in_sigterm_broadcast(1, seq=61, epoch=1, batch=0, world=2), world=2)


def stopped_by_a_signal(net: Backend) -> JobFacts:
    """Rank 2 was sent SIGSTOP."""
    ranks = tuple(net.waiting(rank, seq=61) for rank in (0, 1, 3))
    return job(*ranks, witnessed=(process(2, "stopped"),))


def holds_the_gil(net: Backend) -> JobFacts:
    """Rank 2 runs native code that does not release the lock; py-spy saw its line."""
    ranks = tuple(net.waiting(rank, seq=61) for rank in (0, 1, 3))
    return job(*ranks, witnessed=(process(2, "running", gil_held=True, stack=(user("training_step", 41),)),))


def _silent_host(facts: JobFacts, *ranks: int, answers: bool) -> JobFacts:
    tried = "it refused a connection, so its kernel runs" if answers else "no answer within 1 s"
    host = SilentHost(host="node-2", ranks=ranks, address="10.0.0.2", answers=answers, seen_from="node-1", tried=tried)
    return replace(facts, silent_hosts=(host,))


def host_is_cut_off(net: Backend) -> JobFacts:
    """All ranks of a host are silent, and the host does not answer either."""
    return _silent_host(host_does_not_answer(net), 2, 3, answers=False)


def host_of_one_rank_is_cut_off(net: Backend) -> JobFacts:
    """The same with one rank a host; the connections to it have broken, as to a rank that is dead."""
    facts = job(*(transport_error(net.waiting(rank, seq=61)) for rank in (0, 1, 2)), world=4)
    return _silent_host(facts, 3, answers=False)


def host_can_be_reached(net: Backend) -> JobFacts:
    """Its kernel refuses a connection: it is the processes there that do not answer."""
    return _silent_host(host_does_not_answer(net), 2, 3, answers=True)


def host_does_not_answer(net: Backend) -> JobFacts:
    """Ranks 2 and 3 are on another host."""
    return job(*(net.waiting(rank, seq=61) for rank in (0, 1)))


def link_is_broken(net: Backend) -> JobFacts:
    """Everyone has called the same."""
    return job(*(net.waiting(rank, seq=61) for rank in range(4)))


def own_callback_hangs(net: Backend) -> JobFacts:
    """A fault of this package: its own callback does not return on rank 2."""
    culprit = net.working(2, *OWN_WAIT, seq=60, action="[Callback]CollectiveTimer.on_train_batch_end")
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def hook_at_the_end_hangs(net: Backend) -> JobFacts:
    """Rank 2 alone is in on_fit_end; the others have finished, and leave."""
    options = {"action": "[LightningModule]Net.on_fit_end", "batch": 19, "last": True}
    culprit = net.working(2, user("on_fit_end", 80), seq=60, **options)
    return job(*(culprit if rank == 2 else net.finished(rank, seq=60, batch=19) for rank in range(4)))


def a_logger_sends_at_the_end(net: Backend) -> JobFacts:
    """The user's own logger of rank 0, which Lightning finalizes at the end of fit; the others have finished."""
    stack = (TEARDOWN, user("finalize", 80), user("send", 82))
    culprit = net.working(0, *stack, seq=60, action="", batch=19, last=True)
    return job(culprit, *(net.finished(rank, seq=60, batch=19) for rank in range(1, 4)))


def a_handler_of_logging_sends(net: Backend) -> JobFacts:
    """A collector has stopped to read what a handler of Python's logging sends; the Trainer's logger is elsewhere."""
    handler = Frame(file="/usr/lib/python3.12/logging/__init__.py", line=1700, function="callHandlers")
    sends = Frame(file="/usr/lib/python3.12/logging/handlers.py", line=680, function="emit")
    culprit = net.working(1, user("training_step", 57), handler, sends, seq=60, action=TRAINING_STEP)
    disk = StorageFacts(owner="TensorBoardLogger", path="/mnt/logs", filesystem="nfs4")
    return job(replace(culprit, storage=(disk,)), *(net.waiting(rank, seq=61) for rank in (0, 2, 3)))


def waits_at_a_breakpoint(net: Backend) -> JobFacts:
    """A breakpoint() was left in training_step; rank 2 has reached it first."""
    prompt = Frame(file="/usr/lib/python3.12/pdb.py", line=432, function="_cmdloop", code="self.cmdloop()")
    culprit = net.working(2, user("training_step", 40), prompt, seq=60, action=TRAINING_STEP)
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def slow_step(net: Backend) -> JobFacts:
    """Rank 2's training_step takes long, for no reason that can be seen."""
    culprit = net.working(2, user("training_step", 40), user("slow", 90), seq=60, action=TRAINING_STEP)
    return job(*(culprit if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def each_waits_by_itself(net: Backend) -> JobFacts:
    """All ranks take their batch out of a queue that nobody fills any more."""
    stack = (user("training_step", 40), QUEUE_GET, CONDITION_WAIT)
    return job(*(net.working(rank, *stack, seq=60, action=TRAINING_STEP) for rank in range(4)))


def outage_that_two_ranks_meet(net: Backend) -> JobFacts:
    """Rank 1 reads a sample from a file server that is down, rank 2 a table in its step, which others skip."""
    answer = user("answer_of_the_file_server", 90)
    sample = net.working(1, NEXT_DATA, FETCH, user("__getitem__", 12), answer, seq=60, action=NEXT)
    step = user("training_step", 40, condition="if self.global_rank == 2:  (line 39)")
    table = net.working(2, step, answer, seq=60, action=TRAINING_STEP)
    return job(net.waiting(0, seq=61), sample, table, net.waiting(3, seq=61))


def rank_zero_works_and_the_others_look_for_its_file(net: Backend) -> JobFacts:
    """Nobody is in a collective: rank 0 waits for a program, and the others sleep until its file is there."""
    rests = MachineFacts(main_thread=MainThreadFacts(over_s=20.0, looks=20, ran_s=0.1, queued_s=0.0))
    converting = user("on_train_epoch_end", 81, condition="if trainer.is_global_zero:  (line 79)")
    culprit = net.working(0, converting, SUBPROCESS_WAIT, seq=60, action=EPOCH_END)
    others = (net.working(rank, user("on_train_epoch_end", 84), seq=60, action=EPOCH_END) for rank in (1, 2, 3))
    return job(*(replace(facts, machine=rests) for facts in (culprit, *others)))


SCENES = (
    Scene("rank 0 evaluates", rank_zero_evaluates, "rank-zero-only-work", (0,), f"{USER_FILE}:73 in evaluate"),
    Scene(
        "rank 0 evaluates through a loader",
        rank_zero_evaluates_through_a_loader,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:12 in __getitem__",
    ),
    Scene(
        "rank 0 evaluates before it presents its loaders",
        rank_zero_evaluates_before_it_presents_its_loaders,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:73 in evaluate",
    ),
    Scene(
        "decorated callback", decorated_callback, "rank-zero-only-work", (0,), f"{USER_FILE}:31 in on_train_batch_end"
    ),
    Scene(
        "hook that others left",
        hook_that_others_left,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:55 in on_validation_epoch_end",
    ),
    Scene(
        "hook that holds a rank",
        hook_that_holds_a_rank,
        "rank-behind",
        (2,),
        f"{USER_FILE}:55 in on_validation_epoch_end",
    ),
    Scene(
        "callback of a batch that holds a rank",
        callback_of_a_batch_that_holds_a_rank,
        "rank-behind",
        (0,),
        f"{USER_FILE}:55 in on_validation_epoch_end",
    ),
    Scene(
        "loaders that one rank makes for long",
        loaders_that_one_rank_makes_for_long,
        "late-at-init",
        (1,),
        f"{USER_FILE}:21 in train_dataloader",
    ),
    Scene(
        "ranks that wait for a file of rank 0",
        ranks_that_wait_for_a_file_of_rank_zero,
        "late-at-init",
        (1, 2, 3),
        f"{USER_FILE}:30 in setup",
    ),
    Scene(
        "rank 0 tokenises in setup",
        rank_zero_tokenises_in_setup,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:18 in setup",
    ),
    Scene(
        "one rank estimates steps under a condition",
        one_rank_estimates_steps_under_a_condition,
        "unpresented-loader",
        (0,),
        f"{USER_FILE}:33 in configure_optimizers",
    ),
    Scene(
        "a barrier in prepare_data",
        barrier_in_prepare_data,
        "diverged-collectives",
        (0,),
        f"{USER_FILE}:20 in prepare_data",
    ),
    Scene(
        "the Trainer is called on one rank",
        trainer_called_on_one_rank,
        "diverged-collectives",
        (0,),
        f"{USER_FILE}:201 in main",
    ),
    Scene("one rank skips validation", one_rank_skips_validation, "unpresented-loader", (2,)),
    Scene(
        "one rank estimates steps",
        one_rank_estimates_steps,
        "unpresented-loader",
        (1, 2, 3),
        f"{USER_FILE}:33 in configure_optimizers",
    ),
    Scene("holds a lock into a barrier", holds_a_lock_into_a_barrier, "file-lock", (1,), f"{USER_FILE}:12 in fetch"),
    Scene("late in setup", late_in_setup, "late-at-init", (0,), f"{USER_FILE}:18 in setup"),
    Scene("not yet joined", not_yet_joined, "late-at-init", (3,), f"{USER_FILE}:9 in main"),
    Scene("not yet joined, swapping", not_yet_joined_in_disk_sleep, "late-at-init", (3,)),
    Scene("short rank finished", short_rank_finished, "uneven-batches", (1,)),
    Scene("short rank in validation", short_rank_in_validation, "uneven-batches", (1,)),
    Scene(
        "should_stop on one rank",
        should_stop_on_one_rank,
        "stopped-early",
        (1,),
        f"{USER_FILE}:70 in training_step",
    ),
    Scene("one rank validates by its clock", one_rank_validates_by_its_clock, "stopped-early", (1,)),
    Scene(
        "one rank validates within its epoch",
        one_rank_validates_within_its_epoch,
        "stopped-early",
        (1,),
        f"{USER_FILE}:64 in on_train_start",
    ),
    Scene("a StopIteration left a hook", a_stop_iteration_left_a_hook, "stopped-early", (1,)),
    Scene("more optimizer steps on one rank", more_optimizer_steps_on_one_rank, "stopped-early", (1,)),
    Scene(
        "an optimizer step left out on one rank",
        an_optimizer_step_left_out_on_one_rank,
        "stopped-early",
        (1,),
        f"{USER_FILE}:70 in training_step",
    ),
    Scene("another accumulation on one rank", another_accumulation_on_one_rank, "different-trainer-settings", (1,)),
    Scene("two ranks resumed elsewhere", two_ranks_resumed_elsewhere, "different-trainer-settings", (0, 1, 2, 3)),
    Scene("short rank broke the connection", short_rank_broke_the_connection, "uneven-batches", (1,)),
    Scene("logger flushes", logger_flushes, "slow-logger", (0,)),
    Scene("offloaded logger blocks", offloaded_logger_blocks, "slow-logger", (0,)),
    Scene(
        "logger under a condition",
        logger_called_under_a_condition,
        "slow-logger",
        (0,),
        f"{USER_FILE}:44 in training_step",
    ),
    Scene("checkpoint is written", checkpoint_is_written, "slow-checkpoint", (0,)),
    Scene("loader's workers stall", loader_workers_stall, "data-stall", (2,), f"{USER_FILE}:8 in read"),
    Scene(
        "loader without workers", loader_stalls_without_workers, "data-stall", (2,), f"{USER_FILE}:12 in __getitem__"
    ),
    Scene("all loaders stall", all_loaders_stall, "data-stall", (0, 1, 2, 3)),
    Scene("one rank fails", one_rank_fails, "failed-rank", (3,), f"{USER_FILE}:42 in training_step"),
    Scene(
        "one rank fails, connections break",
        one_rank_fails_and_breaks_connections,
        "failed-rank",
        (3,),
        f"{USER_FILE}:42 in training_step",
    ),
    Scene("one rank was killed", one_rank_was_killed, "dead-rank", (1,)),
    Scene("one rank gone unseen", one_rank_gone_unseen, "dead-rank", (1,)),
    Scene("one rank skips a step", one_rank_skips_a_step, "diverged-collectives", (1,)),
    Scene(
        "collective under a condition",
        collective_under_a_condition,
        "diverged-collectives",
        (0,),
        f"{USER_FILE}:50 in on_train_epoch_end",
    ),
    Scene("stopped by a signal", stopped_by_a_signal, "stopped-process", (2,)),
    Scene("holds the GIL", holds_the_gil, "gil-held", (2,), f"{USER_FILE}:41 in training_step"),
    Scene("host does not answer", host_does_not_answer, "frozen-rank", (2, 3)),
    Scene("host is cut off", host_is_cut_off, "unreachable-host", (2, 3)),
    Scene("host of one rank is cut off", host_of_one_rank_is_cut_off, "unreachable-host", (3,)),
    Scene("host can be reached", host_can_be_reached, "frozen-rank", (2, 3)),
    Scene("link is broken", link_is_broken, "all-joined", (0, 1, 2, 3)),
    Scene("own callback hangs", own_callback_hangs, "own-code", (2,), location_of(OWN_WAIT[1])),
    Scene("hook at the end hangs", hook_at_the_end_hangs, "unfinished-rank", (2,), f"{USER_FILE}:80 in on_fit_end"),
    Scene(
        "a handler of logging sends",
        a_handler_of_logging_sends,
        "slow-logger",
        (1,),
        f"{USER_FILE}:57 in training_step",
    ),
    Scene("a logger sends at the end", a_logger_sends_at_the_end, "slow-logger", (0,), f"{USER_FILE}:82 in send"),
    Scene("waits at a breakpoint", waits_at_a_breakpoint, "at-breakpoint", (2,), f"{USER_FILE}:40 in training_step"),
    Scene("slow step", slow_step, "rank-behind", (2,), f"{USER_FILE}:90 in slow"),
    Scene(
        "outage that two ranks meet",
        outage_that_two_ranks_meet,
        "rank-behind",
        (1, 2),
        f"{USER_FILE}:90 in answer_of_the_file_server",
    ),
    Scene(
        "rank 0 works and the others look for its file",
        rank_zero_works_and_the_others_look_for_its_file,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:81 in on_train_epoch_end",
    ),
    Scene(
        "each waits by itself",
        each_waits_by_itself,
        "rank-behind",
        (0, 1, 2, 3),
        f"{USER_FILE}:40 in training_step",
    ),
)
