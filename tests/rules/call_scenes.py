"""Scenes of causes in what ranks call and how their code goes, after what real trainings on gloo have recorded."""

from dataclasses import replace

from builders import (
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    CHECKPOINT_IO,
    DUMP_CHECKPOINT,
    ENGINE,
    EPOCH_END,
    GRADIENTS,
    RUN,
    SITE,
    TORCH_SAVE,
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
    Action,
    Collective,
    EndedProcess,
    ExceptionFacts,
    Frame,
    Group,
    JobFacts,
    LoggedKey,
    ModelUnit,
    Phase,
    Progress,
    RankFacts,
    StepFacts,
    TrainerFacts,
    UnitKind,
)

RESULT = Frame(
    file=f"{SITE}/lightning/pytorch/trainer/connectors/logger_connector/result.py", line=248, function="compute"
)
READ = Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=1714, function="callback_metrics")
SAVE = Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=1465, function="save_checkpoint")
RECV = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=2793, function="recv", code="work.wait()")
ALL_GATHER = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=4100, function="all_gather")
SEND = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=2793, function="send", code="work.wait()")
NEW_GROUP = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=5863, function="new_group")
DDP_FORWARD = Frame(file=f"{SITE}/torch/nn/parallel/distributed.py", line=1775, function="_pre_forward")
INDUCTOR = Frame(file=f"{SITE}/torch/_inductor/async_compile.py", line=818, function="wait")
WAIT = Frame(file="/usr/lib/python3.12/threading.py", line=327, function="wait", code="waiter.acquire()")
AUTOMATIC = Frame(file=f"{SITE}/lightning/pytorch/loops/optimization/automatic.py", line=323, function="_training_step")

BUCKET = ModelUnit(
    kind=UnitKind.DDP_BUCKET,
    name="1 of 1",
    parameters=("head.weight", "branch.weight", "trunk.weight"),
    parameter_count=3,
    elements=25_557,
    size_bytes=102_228,
)
LOST_LOSS = "val_extra"
NO_SPACE = "[Errno 28] No space left on device: '/ckpt/step=3.ckpt'"
UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss."
)
SKIPPED = "Skipping the `training_step` by returning None in distributed training is not supported."


def in_backward(net: Backend, rank: int, *, seq: int = 61, **more: object) -> RankFacts:
    """A rank that waits for its peers' gradients, which are known to be its only bucket."""
    return replace(net.waiting(rank, seq=seq, **more), units=(BUCKET,), steps=StepFacts(with_backward=12))


def in_hook(progress: Progress, hook: str) -> Progress:
    """The same moment within a hook of the module."""
    return replace(progress, actions=(*progress.actions, Action(name=f"[LightningModule]Net.{hook}", for_s=1.0)))


def ordered(ranks: dict[int, RankFacts]) -> JobFacts:
    """A job of these ranks, in their order."""
    return job(*(ranks[number] for number in sorted(ranks)))


def with_size(facts: RankFacts, seq: int, sizes: tuple[tuple[int, ...], ...], kind: str = "Float") -> RankFacts:
    """The same rank, having called a collective of another size."""
    calls = tuple(
        replace(call, input_sizes=sizes, output_sizes=sizes, dtypes=(kind,)) if call.seq == seq else call
        for call in facts.collectives
    )
    return replace(facts, collectives=calls)


def another_size(net: Backend) -> JobFacts:
    """Rank 2 reduces a tensor with one more row, from the same line."""
    line = user("training_step", 57)
    ranks = (net.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP) for n in range(4))
    return job(*(with_size(facts, 61, ((9000,),)) if facts.rank == 2 else facts for facts in ranks))


def another_type(net: Backend) -> JobFacts:
    """Rank 1's loss is in double precision."""
    line = user("training_step", 60)
    ranks = (net.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP) for n in range(4))
    return job(*(with_size(facts, 61, GRADIENTS, "Double") if facts.rank == 1 else facts for facts in ranks))


def overrun_rank(net: Backend) -> JobFacts:
    """As recorded: gloo has ended rank 0, to which rank 1 sent more than it had room for; the connections broke."""
    line = user("training_step", 57)
    ranks = [net.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP, world=3) for n in (1, 2)]
    lost = [transport_error(with_size(facts, 61, ((8000 + (facts.rank == 1) * 1000,),))) for facts in ranks]
    lost = [raised(facts, "RuntimeError", "Connection closed by peer", line, consequence=True) for facts in lost]
    if net.name != "gloo":
        return another_size(net)
    return job(*lost, world=3, witnessed=(process(0, "zombie"),))


def another_precision_where_one_is_gone(net: Backend) -> JobFacts:
    """Rank 1 trains in single precision, the others in half: gloo has ended rank 0, to which it sent too much."""
    if net.name != "gloo":
        return another_precision(net)
    lost = [transport_error(facts) for facts in another_precision(net).ranks if facts.rank]
    said = "Enforce fail at pair.cc:460] op.preamble.length <= op.nbytes. 102228 vs 51114"
    return job(*lost, world=3, witnessed=(process(0, "zombie", ended_by="SIGABRT", said=said),))


def another_precision(net: Backend) -> JobFacts:
    """The same, with all ranks there."""
    ranks = []
    for n in range(3):
        facts = net.rank(n, ENGINE, seq=61, outstanding=1, action=BACKWARD, world=3)
        facts = with_size(facts, 61, GRADIENTS, "Float" if n == 1 else "BFloat16")
        settings = {"precision": "32-true" if n == 1 else "bf16-true"}
        ranks.append(replace(facts, trainer=TrainerFacts(settings=settings)))
    return job(*ranks, world=3)


def _in_group(number: int, name: str, net: Backend) -> RankFacts:
    """A rank that waits in the first collective of one of two groups, as recorded."""
    other = "2" if name == "1" else "1"
    groups = (
        Group(name=name, description=f"side {name}", ranks=(0, 1, 2), last_enqueued=1),
        Group(name=other, description=f"side {other}", ranks=(0, 1, 2)),
    )
    call = Collective(group=name, seq=1, op="all_reduce", backend=net.name, input_sizes=((4,),), dtypes=("Float",))
    base = net.rank(number, user("training_step", 68), ALL_REDUCE, seq=0, action=TRAINING_STEP, world=3)
    return replace(base, groups=groups, collectives=(call,))


def groups_in_another_order(net: Backend) -> JobFacts:
    """Rank 1 has entered group 2 first, the others group 1."""
    return job(*(_in_group(n, "2" if n == 1 else "1", net) for n in range(3)), world=3)


def call_of_a_pair_left_out(net: Backend) -> JobFacts:
    """Ranks meet in pairs and then all together in each step, and rank 2 has not met its own in this one."""
    ranks = []
    for rank in range(4):
        pair, others = str(1 + rank // 2), {"backend": net.name, "op": "all_reduce", "dtypes": ("Float",)}
        met = [
            call
            for step in range(1, 6)
            for call in (
                Collective(group=pair, seq=step, input_sizes=((1,),), completed=True, **others),  # type: ignore[arg-type]
                Collective(group="0", seq=step, input_sizes=GRADIENTS, completed=True, **others),  # type: ignore[arg-type]
            )
        ]
        waits_for_all = replace(met.pop(), completed=False)
        waits_for_pair = replace(met.pop(), completed=rank < 2)
        met += {2: [waits_for_all], 3: [waits_for_pair]}.get(rank, [waits_for_pair, waits_for_all])
        called = {name: max(call.seq for call in met if call.group == name) for name in ("0", pair)}
        groups = tuple(
            Group(name=name, ranks=(0, 1, 2, 3) if name == "0" else (2 * (rank // 2), 2 * (rank // 2) + 1))
            for name in ("0", pair)
        )
        groups = tuple(
            replace(
                group,
                last_enqueued=called[group.name],
                last_completed=max(call.seq for call in met if call.group == group.name and call.completed),
            )
            for group in groups
        )
        stack = (user("with_its_pair", 33), ALL_REDUCE) if rank == 3 else (ENGINE,)
        base = net.rank(rank, *stack, seq=0, action=TRAINING_STEP if rank == 3 else BACKWARD)
        ranks.append(replace(base, groups=groups, collectives=tuple(met)))
    return job(*ranks)


def hook_of_a_checkpoint_that_waits(net: Backend) -> JobFacts:
    """Rank 0 tells somebody of the checkpoint while it is put together, and gets no answer."""
    hook = user("on_save_checkpoint", 64, condition="if trainer.is_global_zero:  (line 63)")
    save = Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=1380, function="save_checkpoint")
    tells = net.working(
        0,
        *(save, DUMP_CHECKPOINT, hook, user("tell", 58, code="return chat.recv(64)")),
        seq=60,
        phase=Phase.CHECKPOINT,
        action="[Callback]Notifying.on_save_checkpoint",
    )
    options = {"phase": Phase.CHECKPOINT}
    return job(tells, *(net.in_barrier(rank, "Trainer.save_checkpoint", seq=61, **options) for rank in (1, 2, 3)))


def step_skipped_twice_by_hand(net: Backend) -> JobFacts:
    """Manual optimization: rank 1 left a batch of each epoch, in both of which the others have gone on to backward."""
    steps = StepFacts(with_backward=10, skipped=2, skipped_epoch=1, skipped_batch=3, passes_epoch=1, passes_batch=5)
    culprit = replace(net.finished(1, seq=60, batch=-1, epoch=2), steps=steps)
    made = StepFacts(with_backward=10, passes_epoch=1, passes_batch=3)
    line = user("training_step", 47)
    others = {
        n: replace(net.rank(n, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((1,),), epoch=1, batch=4), steps=made)
        for n in (0, 2, 3)
    }
    return ordered({1: culprit} | others)


def search_that_ends_sooner(net: Backend) -> JobFacts:
    """An optimizer asks for the loss again; rank 1's has asked once in batch 3, and the run is out of step since."""
    again = f"{USER_FILE}:14 in step"
    made = StepFacts(with_backward=12, passes=((0, 0, 2, 0, 1),), passes_epoch=1, passes_batch=4)
    made = replace(made, under_way=(1, 5, 1), passes_from=(("", again), ()))
    fewer = ((0, 0, 2, 0, 1), (0, 3, 1, 0, 1), (0, 4, 2, 0, 1))
    culprit = replace(
        net.finished(1, seq=60, batch=-1, epoch=2),
        steps=replace(made, passes=fewer, passes_batch=5, under_way=(), passes_from=(("", again), (), ("", again))),
    )
    others = {n: replace(in_backward(net, n, epoch=1, batch=5, last=True), steps=made) for n in (0, 2, 3)}
    return ordered({1: culprit} | others)


def tags_that_do_not_match(net: Backend) -> JobFacts:
    """Gloo records neither isend nor irecv: ranks 0 and 1 wait for what they have begun, rank 2 for both."""
    wait = user("hand_over", 75, code="work.wait()")
    pair = (net.working(n, wait, seq=60, action=TRAINING_STEP, world=3) for n in (0, 1))
    return job(*pair, net.waiting(2, seq=61, world=3), world=3)


def microbatch_too_few(net: Backend) -> JobFacts:
    """Rank 0 has sent one less than rank 1 receives, and goes on; sends and receives are counted along by PyTorch."""
    receives = net.working(1, user("receive", 76), RECV, seq=61, action=TRAINING_STEP, world=2)
    called = tuple(call for call in receives.collectives if call.seq < 61)
    return job(net.waiting(0, seq=61, world=2), replace(receives, collectives=called, steps=StepFacts(peer=0)), world=2)


def receive_too_many(net: Backend) -> JobFacts:
    """Of four ranks, one waits for a send of its neighbour, which waits for its gradients like all others."""
    receives = net.working(2, user("receive", 76), RECV, seq=60, action=TRAINING_STEP)
    own = replace(receives, steps=StepFacts(peer=1))
    return job(*(own if rank == 2 else net.waiting(rank, seq=61) for rank in range(4)))


def peers_counted_within_a_pipeline(net: Backend) -> JobFacts:
    """Ranks 2 and 3 give their numbers within their pipeline: those of ranks 0 and 1, which have exchanged already."""
    path = (user("training_step", 40, code="self.hand_on(x)"), user("hand_on", 75, code="call(x, other)"))
    last = {"seq": 60, "action": TRAINING_STEP}
    sends = replace(net.working(2, *path, SEND, **last), steps=StepFacts(peer=1))
    receives = replace(net.working(3, *path, RECV, **last), steps=StepFacts(peer=0))
    return job(*(in_backward(net, rank) for rank in (0, 1)), sends, receives)


def shape_that_is_not_sent(net: Backend) -> JobFacts:
    """Rank 1 receives a shape first, and rank 0 has sent the values without one: under another tag."""
    sends = net.working(0, user("hand_over", 71), SEND, seq=60, action=TRAINING_STEP, world=2)
    receives = net.working(1, user("take_over", 76), RECV, seq=60, action=TRAINING_STEP, world=2)
    return job(replace(sends, steps=StepFacts(peer=1)), replace(receives, steps=StepFacts(peer=0)), world=2)


def makes_group(net: Backend, number: int, made: int, *places: str) -> RankFacts:
    facts = net.working(number, user("setup", 22), NEW_GROUP, seq=7, phase=Phase.INIT, batch=-1)
    return replace(facts, steps=StepFacts(groups_made=made, groups_at=places))


def groups_made_by_their_members(net: Backend) -> JobFacts:
    """Rank 0 has made one that the others know nothing of, and is one number ahead."""
    place = f"{USER_FILE}:20 in setup"
    return job(*(makes_group(net, n, 3 if n < 1 else 2, place) for n in range(4)))


def both_receive(net: Backend) -> JobFacts:
    """Ranks 0 and 1 receive from each other before either sends; rank 2 has gone on."""
    pair = (
        replace(
            net.working(n, user("exchange", 73), RECV, seq=60, action=TRAINING_STEP, world=3),
            steps=StepFacts(peer=1 - n),
        )
        for n in (0, 1)
    )
    return job(*pair, net.waiting(2, seq=61, world=3), world=3)


def logged(*names: str) -> tuple[LoggedKey, ...]:
    """Keys of validation_step with the lines that log them."""
    lines = {"val_loss": 102, LOST_LOSS: 104, "val_other": 106}
    places = {name: f"{USER_FILE}:{lines[name]} in validation_step" for name in names}
    return tuple(LoggedKey(name=name, hook="validation_step", place=places[name]) for name in names)


def _logging(*names: str, reducing: str = "", passes: int = 12) -> StepFacts:
    return StepFacts(with_backward=passes, logged=logged(*names), reducing=reducing)


def metric_with_a_state_fewer(net: Backend) -> JobFacts:
    """Rank 1 has nothing more to reduce, and has finished."""
    long = net.rank(0, RESULT, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), phase=Phase.VALIDATE, world=2)
    short = net.finished(1, seq=60, batch=19, world=2)
    (key,) = logged("val_loss")
    told = [
        replace(facts, steps=StepFacts(logged=(replace(key, states=states),)))
        for facts, states in ((long, ("total", "count")), (short, ("total",)))
    ]
    return job(*told, world=2)


def generator_left_out_once(net: Backend) -> JobFacts:
    """Rank 1's turn of one optimizer was left out long ago; the gradients have met in another order since."""
    short = net.rank(
        1, BARRIER, seq=60, op="barrier", sizes=(), outstanding=1, phase=Phase.VALIDATE, last=True, world=2
    )
    long = net.waiting(0, seq=61, batch=19, world=2)
    long = replace(long, units=(BUCKET,))
    passes = StepFacts(with_backward=20, passes=((0, 0, 2),), passes_epoch=0, passes_batch=18)
    fewer = replace(passes, passes=((0, 0, 2), (0, 3, 1), (0, 4, 2)), passes_batch=19)
    return job(replace(long, steps=passes), replace(short, steps=fewer), world=2)


def key_of_one_rank(net: Backend) -> JobFacts:
    """As recorded: at the end of validation rank 1 reduces one key more; the others are in the next epoch."""
    alone = net.rank(
        1, RESULT, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), phase=Phase.VALIDATE, batch=5, last=True
    )
    alone = replace(alone, steps=_logging("val_loss", LOST_LOSS, reducing=LOST_LOSS))
    others = {
        n: replace(in_backward(net, n, epoch=1, batch=0), steps=_logging("val_loss", passes=13)) for n in (0, 2, 3)
    }
    return ordered({1: alone} | others)


def key_read_by_one_rank(net: Backend) -> JobFacts:
    """Rank 1 reads `trainer.callback_metrics` in a callback, which reduces a key; the others are past it."""
    line = user("on_validation_end", 77, code="best = trainer.callback_metrics['val_loss']")
    facts = key_of_one_rank(net)
    ranks = {one.rank: one for one in facts.ranks}
    reading = ranks[1]
    hooks = [one for one in reading.stack if not one.user]
    ranks[1] = replace(reading, stack=(*hooks[:1], line, READ, *hooks[1:]))
    return ordered(ranks)


def key_that_one_rank_lacks(net: Backend) -> JobFacts:
    """Rank 2 has not logged what the others reduce, and has gone on to its backward pass."""
    options = {"op": "barrier", "sizes": (), "outstanding": 1, "phase": Phase.VALIDATE, "batch": 5, "last": True}
    waiting = {n: net.rank(n, RESULT, BARRIER, seq=61, **options) for n in (0, 1, 3)}  # type: ignore[arg-type]
    ranks = {
        n: replace(facts, steps=_logging("val_loss", LOST_LOSS, reducing=LOST_LOSS)) for n, facts in waiting.items()
    }
    ranks[2] = replace(in_backward(net, 2, epoch=1, batch=0), steps=_logging("val_loss", passes=13))
    return ordered(ranks)


def step_that_lightning_refuses(net: Backend) -> JobFacts:
    """As recorded: rank 1's training_step returned None, and Lightning has raised."""
    steps = StepFacts(
        with_backward=11,
        skipped=1,
        skipped_epoch=0,
        skipped_batch=11,
        returns_nothing=(f"{USER_FILE}:88 in training_step",),
    )
    culprit = raised(replace(net.working(1, seq=60), steps=steps), "RuntimeError", SKIPPED, RUN, AUTOMATIC)
    return job(*(culprit if n == 1 else in_backward(net, n) for n in range(4)))


def step_skipped_by_hand(net: Backend) -> JobFacts:
    """Manual optimization: rank 1 left a batch without manual_backward, and is one all-reduce short at the end."""
    steps = StepFacts(with_backward=19, skipped=1, skipped_epoch=0, skipped_batch=3)
    culprit = replace(net.finished(1, seq=60, batch=19), steps=steps)
    others = {
        n: replace(in_backward(net, n, batch=19, last=True), steps=StepFacts(with_backward=20)) for n in (0, 2, 3)
    }
    return ordered({1: culprit} | others)


def branch_without_gradient(net: Backend) -> JobFacts:
    """As recorded: rank 1's data did not need a branch, and DDP refuses its next forward."""
    steps = StepFacts(
        with_backward=12,
        without_gradient=("branch.weight", "branch.bias"),
        without_gradient_count=2,
        unused_at=f"{USER_FILE}:51 in forward",
    )
    culprit = raised(replace(net.working(1, seq=60, batch=12), steps=steps), "RuntimeError", UNUSED, RUN, DDP_FORWARD)
    return job(*(culprit if n == 1 else in_backward(net, n) for n in range(4)))


def branch_unused_before_validation(net: Backend) -> JobFacts:
    """As recorded: the same in the last batch; rank 1 is in the reduction at the end of validation.

    Its gradients are gone by then: only that it has left a backward pass tells.
    """
    steps = StepFacts(with_backward=12)
    options = {"op": "barrier", "sizes": (), "outstanding": 1, "phase": Phase.VALIDATE, "batch": 5, "last": True}
    culprit = replace(net.rank(1, RESULT, BARRIER, seq=61, **options), steps=steps)  # type: ignore[arg-type]
    return job(*(culprit if n == 1 else in_backward(net, n, batch=12, last=True) for n in range(4)))


def _gathering(net: Backend, rank: int, name: str, shard: int) -> RankFacts:
    unit = ModelUnit(kind=UnitKind.FSDP_UNIT, name=name, elements=4 * shard, shard_elements=shard, groups=("0",))
    stack = (user("forward", 51), Frame(file=f"{SITE}/torch/distributed/fsdp/_fully_shard.py", line=1, function="x"))
    waiting = net.rank(rank, *stack, ALL_REDUCE, seq=61, outstanding=1, op="all_gather", action=TRAINING_STEP)
    calls = tuple(
        replace(call, input_sizes=((shard,),), output_sizes=((4 * shard,),)) if call.seq == 61 else call
        for call in waiting.collectives
    )
    return replace(waiting, collectives=calls, units=(unit,))


def expert_left_out(net: Backend) -> JobFacts:
    """FSDP: rank 2 has no token for an expert and gathers the head, while the others gather the expert."""
    return job(*(_gathering(net, n, "head" if n == 2 else "expert", 500 if n == 2 else 9000) for n in range(4)))


def group_with_a_shorter_timeout(net: Backend) -> JobFacts:
    """As recorded: a group for metrics was made with 4 s; rank 1 is merely slow, the others have given up."""
    line = user("training_step", 79)
    message = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
    ranks = []
    for n in (0, 2, 3):
        call = Collective(
            group="1", seq=1, op="all_reduce", backend=net.name, completed=True, input_sizes=((4,),), timeout_ms=4000
        )
        base = net.working(n, seq=60)
        own = Group(name="1", description="metrics", ranks=(0, 1, 2, 3), last_enqueued=1, last_completed=1)
        lost = replace(base, groups=(*base.groups, own), collectives=(*base.collectives, call))
        ranks.append(raised(lost, "RuntimeError", message, RUN, line, ALL_REDUCE, consequence=True))
    slow = net.working(1, user("training_step", 78), seq=60, action=TRAINING_STEP)
    return job(ranks[0], slow, *ranks[1:])


def one_rank_compiles(net: Backend) -> JobFacts:
    """As recorded: rank 1's cache is cold, and it waits for its C++ compiler."""
    stack = (user("training_step", 82), INDUCTOR, WAIT)
    culprit = net.working(1, *stack, seq=60, action=TRAINING_STEP, batch=3)
    return job(*(culprit if n == 1 else in_backward(net, n, batch=3) for n in range(4)))


def save_failed_and_was_caught(net: Backend) -> JobFacts:
    """As recorded: rank 0's disk is full, its callback swallows that; the others wait in the barrier of the save."""
    stack = (RUN, user("on_train_batch_end", 117), SAVE, CHECKPOINT_IO, TORCH_SAVE)
    failed = ExceptionFacts(type="OSError", message=NO_SPACE, stack=stack)
    culprit = replace(in_backward(net, 0, batch=3), failed_save=failed)
    options = {"phase": Phase.CHECKPOINT, "batch": 2}
    others = (net.in_barrier(n, "Trainer.save_checkpoint", seq=61, **options) for n in (1, 2, 3))
    return job(culprit, *others)


def save_failed(net: Backend) -> JobFacts:
    """As recorded: the same, with nobody to catch it."""
    stack = (RUN, user("on_train_batch_end", 117), SAVE, CHECKPOINT_IO, TORCH_SAVE)
    culprit = raised(net.working(0, seq=60, batch=2), "OSError", NO_SPACE, *stack)
    options = {"phase": Phase.CHECKPOINT, "batch": 2}
    return job(culprit, *(net.in_barrier(n, "Trainer.save_checkpoint", seq=61, **options) for n in (1, 2, 3)))


def aborted_alone(net: Backend) -> JobFacts:
    """Two ranks on gloo: the one that is left has nobody to be compared with; its child has ended itself."""
    line = user("training_step", 57)
    left = net.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, action=TRAINING_STEP, world=2)
    lost = raised(left, "RuntimeError", "Connection closed by peer", RUN, line, consequence=True)
    machine = replace(lost.machine, ended=(EndedProcess(pid=1001, signal="SIGABRT"),))
    return job(replace(lost, machine=machine), world=2, witnessed=(process(1, "zombie"),))


def prediction_that_cannot_be_saved(net: Backend) -> JobFacts:
    """A writer of predictions, which saves with torch.save as well."""
    stack = (RUN, user("write_on_epoch_end", 48), TORCH_SAVE)
    culprit = raised(net.working(2, seq=60, phase=Phase.PREDICT), "RuntimeError", "Parent directory is gone", *stack)
    return job(culprit, *(net.waiting(n, seq=61, phase=Phase.PREDICT) for n in (0, 1, 3)))


def predictions_gathered_by_most(net: Backend) -> JobFacts:
    """Rank 3 had none, returned before the others' gather, and is done."""
    line = user("write_on_epoch_end", 44)
    options = {"op": "all_gather", "outstanding": 1, "phase": Phase.PREDICT, "last": True}
    others = (net.rank(n, line, ALL_GATHER, seq=61, **options) for n in range(3))  # type: ignore[arg-type]
    return job(*others, net.finished(3, seq=60, batch=11))


def loss_under_another_function(net: Backend) -> JobFacts:
    """The same operation and another size, but rank 0 alone has called it: not the sizes are wrong."""
    line = user("on_train_epoch_end", 50)
    alone = net.rank(0, line, ALL_REDUCE, seq=61, outstanding=1, sizes=((10,),), action=EPOCH_END)
    return job(alone, *(net.waiting(n, seq=61) for n in (1, 2, 3)))


CALL_SCENES = (
    Scene("another size", another_size, "mismatched-collective", (2,), f"{USER_FILE}:57 in training_step"),
    Scene("differs in type", another_type, "mismatched-collective", (1,), f"{USER_FILE}:60 in training_step"),
    Scene(
        "groups in another order", groups_in_another_order, "crossed-groups", (1,), f"{USER_FILE}:68 in training_step"
    ),
    Scene(
        "call of a pair left out",
        call_of_a_pair_left_out,
        "crossed-groups",
        (2,),
        f"{USER_FILE}:33 in with_its_pair",
    ),
    Scene(
        "hook of a checkpoint that waits",
        hook_of_a_checkpoint_that_waits,
        "rank-zero-only-work",
        (0,),
        f"{USER_FILE}:58 in tell",
    ),
    Scene("step skipped twice by hand", step_skipped_twice_by_hand, "skipped-step", (1,)),
    Scene("search that ends sooner", search_that_ends_sooner, "skipped-step", (1,), f"{USER_FILE}:14 in step"),
    Scene("tags that do not match", tags_that_do_not_match, "unmatched-p2p", (0, 1), f"{USER_FILE}:75 in hand_over"),
    Scene(
        "another precision where one is gone",
        another_precision_where_one_is_gone,
        "different-trainer-settings",
        (1,),
    ),
    Scene("prediction not saved", prediction_that_cannot_be_saved, "failed-rank", (2,)),
    Scene(
        "predictions gathered by most",
        predictions_gathered_by_most,
        "diverged-collectives",
        (3,),
        f"{USER_FILE}:44 in write_on_epoch_end",
    ),
    Scene("shape not sent", shape_that_is_not_sent, "unmatched-p2p", (0, 1), f"{USER_FILE}:76 in take_over"),
    Scene("receive too many", receive_too_many, "unmatched-p2p", (2,), f"{USER_FILE}:76 in receive"),
    Scene(
        "peers counted within a pipeline",
        peers_counted_within_a_pipeline,
        "unmatched-p2p",
        (2, 3),
        f"{USER_FILE}:75 in hand_on",
    ),
    Scene("microbatch too few", microbatch_too_few, "unmatched-p2p", (0, 1), f"{USER_FILE}:76 in receive"),
    Scene(
        "groups made by their members",
        groups_made_by_their_members,
        "crossed-groups",
        (0,),
        f"{USER_FILE}:20 in setup",
    ),
    Scene("both receive", both_receive, "unmatched-p2p", (0, 1), f"{USER_FILE}:73 in exchange"),
    Scene("metric with a state fewer", metric_with_a_state_fewer, "diverged-log-keys", (0, 1)),
    Scene("generator left out once", generator_left_out_once, "skipped-step", (1,)),
    Scene(
        "key read by one rank",
        key_read_by_one_rank,
        "diverged-collectives",
        (1,),
        f"{USER_FILE}:77 in on_validation_end",
    ),
    Scene("key of one rank", key_of_one_rank, "diverged-log-keys", (1,), f"{USER_FILE}:104 in validation_step"),
    Scene(
        "key that one rank lacks",
        key_that_one_rank_lacks,
        "diverged-log-keys",
        (2,),
        f"{USER_FILE}:104 in validation_step",
    ),
    Scene(
        "step that Lightning refuses",
        step_that_lightning_refuses,
        "skipped-step",
        (1,),
        f"{USER_FILE}:88 in training_step",
    ),
    Scene("step skipped by hand", step_skipped_by_hand, "skipped-step", (1,)),
    Scene("branch without gradient", branch_without_gradient, "unused-parameters", (1,), f"{USER_FILE}:51 in forward"),
    Scene("branch unused before validation", branch_unused_before_validation, "unused-parameters", (1,)),
    Scene("expert left out", expert_left_out, "unused-parameters", (2,), f"{USER_FILE}:51 in forward"),
    Scene(
        "group with a shorter timeout",
        group_with_a_shorter_timeout,
        "timeout-misuse",
        (0, 2, 3),
        f"{USER_FILE}:79 in training_step",
    ),
    Scene("one rank compiles", one_rank_compiles, "compile-skew", (1,), f"{USER_FILE}:82 in training_step"),
    Scene(
        "save failed and was caught",
        save_failed_and_was_caught,
        "checkpoint-skipped-barrier",
        (0,),
        f"{USER_FILE}:117 in on_train_batch_end",
    ),
    Scene("save failed", save_failed, "exception-during-save", (0,), f"{USER_FILE}:117 in on_train_batch_end"),
    Scene("collective of one function", loss_under_another_function, "diverged-collectives", (0,)),
)
