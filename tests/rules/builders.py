"""Small builders of facts: a job is a line of ranks, each waiting, working, finished or silent.

``gloo()`` and ``nccl()`` give the same scenes as the two back ends record them: gloo blocks inside the call and never
says "started"; NCCL has several collectives outstanding while the main thread reads a value or runs on.
"""

from dataclasses import dataclass, replace

from standing import in_agreement, in_offload, in_preflight

from lightning_ncclsafe.facts import (
    Action,
    Collective,
    ExceptionFacts,
    Frame,
    Group,
    Incident,
    IncidentKind,
    JobFacts,
    MachineFacts,
    MainThreadFacts,
    NotRecorded,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    UnrecordedGroup,
)

SITE = "/venv/lib/python3.12/site-packages"
USER_FILE = "/home/me/project/train.py"

RUN = Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=1000, function="_run")
MAIN = Frame(file=USER_FILE, line=200, function="main", code="trainer.fit(model)", user=True)
BROADCAST = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=3150, function="broadcast")
ALL_REDUCE = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=3256, function="all_reduce")
BARRIER = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=5300, function="barrier")
CREATE_STORE = Frame(file=f"{SITE}/torch/distributed/rendezvous.py", line=190, function="_create_c10d_store")
INIT_GROUP = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=1900, function="init_process_group")
ENGINE = Frame(file=f"{SITE}/torch/autograd/graph.py", line=850, function="_engine_run_backward")
LOOP = f"{SITE}/lightning/pytorch/loops/training_epoch_loop.py"
SIGTERM = Frame(file=LOOP, line=265, function="_broadcast_sigterm_tensor", code="torch.distributed.broadcast(t, src=0)")
SIGTERM_ITEM = replace(SIGTERM, line=269, code="if sigterm_tensor.item() == 1:")
QUEUE_GET = Frame(file="/usr/lib/python3.11/queue.py", line=171, function="get")
SUBPROCESS_WAIT = Frame(file="/usr/lib/python3.11/subprocess.py", line=1264, function="wait")
CONDITION_WAIT = Frame(file="/usr/lib/python3.11/threading.py", line=327, function="wait")
NEXT_DATA = Frame(file=f"{SITE}/torch/utils/data/dataloader.py", line=1480, function="_next_data")
TRY_GET = Frame(file=f"{SITE}/torch/utils/data/dataloader.py", line=1290, function="_try_get_data")
FETCH = Frame(file=f"{SITE}/torch/utils/data/_utils/fetch.py", line=54, function="fetch")
TENSORBOARD = Frame(file=f"{SITE}/lightning/pytorch/loggers/tensorboard.py", line=215, function="save")
SUMMARY_WRITER = Frame(file=f"{SITE}/torch/utils/tensorboard/writer.py", line=1200, function="flush")
# As the probe has seen them.
OWN_WAIT = in_preflight()
OFFLOAD_PUT = in_offload()
AGREEMENT_WAIT = in_agreement()
FLUSH = Frame(
    file=f"{SITE}/tensorboard/summary/writer/event_file_writer.py",
    line=120,
    function="flush",
    code="self._queue.join()",
)
RANK_ZERO = Frame(file=f"{SITE}/lightning_utilities/core/rank_zero.py", line=41, function="wrapped_fn")
TEARDOWN = Frame(file=f"{SITE}/lightning/pytorch/trainer/call.py", line=149, function="_call_teardown_hook")
TORCH_SAVE = Frame(file=f"{SITE}/torch/serialization.py", line=950, function="save")
DUMP_CHECKPOINT = Frame(
    file=f"{SITE}/lightning/pytorch/trainer/connectors/checkpoint_connector.py", line=475, function="dump_checkpoint"
)
STORAGE_COPY = Frame(file=f"{SITE}/torch/storage.py", line=268, function="cpu", code="return self._cpu()")
EMPTY_CACHE = Frame(file=f"{SITE}/torch/cuda/memory.py", line=224, function="empty_cache")
OPTIMIZER = Frame(file=f"{SITE}/torch/optim/sgd.py", line=447, function="_multi_tensor_sgd")
CHECKPOINT_IO = Frame(file=f"{SITE}/lightning/fabric/plugins/io/torch_io.py", line=60, function="save_checkpoint")
INFINITE = Frame(file=f"{SITE}/lightning/fabric/utilities/distributed.py", line=428, function="__exit__")


GRADIENTS = ((25_557,),)
ONE = ((1,),)

TRAINING_STEP = "[Strategy]SafeDDP.training_step"
BACKWARD = "[Strategy]SafeDDP.backward"
EPOCH_END = "[LightningModule]Net.on_train_epoch_end"
NEXT = "[_TrainingEpochLoop].train_dataloader_next"


def user(function: str, line: int, *, condition: str = "", code: str = "", file: str = USER_FILE) -> Frame:
    """A frame of the user's own code."""
    return Frame(file=file, line=line, function=function, user=True, rank_condition=condition, code=code)


@dataclass(frozen=True)
class Backend:
    """How a back end records that a rank has called collectives up to ``seq`` and completed ``seq - outstanding``."""

    name: str
    runs_ahead: int

    def recorded(
        self, seq: int, *, outstanding: int = 0, op: str = "all_reduce", sizes: tuple[tuple[int, ...], ...] = GRADIENTS
    ) -> tuple[Collective, ...]:
        """The recorder's last ten entries."""
        return tuple(
            Collective(
                group="0",
                seq=number,
                # Before the outstanding ones everything was alike on all ranks.
                op=op if number > seq - outstanding else "all_reduce",
                backend=self.name,
                completed=number <= seq - outstanding,
                started=self.name == "nccl" and number <= seq - outstanding + 1,
                input_sizes=sizes if number > seq - outstanding else GRADIENTS,
                dtypes=("Float",),
                created_ns=1_000_000 * number,
            )
            for number in range(max(seq - 9, 1), seq + 1)
        )

    def group(self, seq: int, outstanding: int, world: int) -> Group:
        """The default group's counters."""
        started = -1 if self.name == "gloo" else seq - max(outstanding - 1, 0)
        return Group(
            name="0",
            description="default_pg",
            ranks=tuple(range(world)),
            last_enqueued=seq,
            last_started=started,
            last_completed=seq - outstanding,
        )

    def rank(
        self,
        number: int,
        *stack: Frame,
        seq: int,
        outstanding: int = 0,
        op: str = "all_reduce",
        sizes: tuple[tuple[int, ...], ...] = GRADIENTS,
        phase: Phase = Phase.TRAIN,
        action: str = "",
        epoch: int = 0,
        batch: int = 11,
        last: bool = False,
        idle: float = 23.0,
        world: int = 4,
    ) -> RankFacts:
        """One rank; everything else builds on this."""
        actions = (Action(name="run_training_epoch", for_s=idle + 5),) if phase is not Phase.INIT else ()
        actions += (Action(name=action, for_s=idle),) if action else ()
        return RankFacts(
            rank=number,
            local_rank=number,
            host="node-1",
            pid=1000 + number,
            progress=Progress(
                phase=phase, actions=actions, epoch=epoch, batch_idx=batch, is_last_batch=last, idle_s=idle
            ),
            stack=(MAIN, RUN, *stack) if stack else (),
            groups=(self.group(seq, outstanding, world),) if seq else (),
            collectives=self.recorded(seq, outstanding=outstanding, op=op, sizes=sizes),
        )

    def waiting(self, number: int, *, seq: int, **more: object) -> RankFacts:
        """A rank that waits for its peers in ``seq``, DDP's gradients in backward unless told otherwise."""
        if more.get("op") == "broadcast":
            return self.in_sigterm_broadcast(number, seq=seq, **{k: v for k, v in more.items() if k != "op"})
        ahead = self.runs_ahead
        options = {"action": BACKWARD, "outstanding": 1 + ahead} | more
        return self.rank(number, ENGINE, seq=seq + ahead, **options)  # type: ignore[arg-type]

    def in_sigterm_broadcast(self, number: int, *, seq: int, **more: object) -> RankFacts:
        """A rank in Lightning's per-batch broadcast; on NCCL it hangs in reading the result."""
        stack = (SIGTERM, BROADCAST) if self.name == "gloo" else (SIGTERM_ITEM,)
        options = {"op": "broadcast", "sizes": ONE, "outstanding": 1} | more
        return self.rank(number, *stack, seq=seq, **options)  # type: ignore[arg-type]

    def in_barrier(self, number: int, name: str, *, seq: int, **more: object) -> RankFacts:
        """A rank in one of Lightning's named barriers."""
        options = {"op": "barrier", "sizes": (), "outstanding": 1, "action": f"barrier:{name}"} | more
        return self.rank(number, BARRIER, seq=seq, **options)  # type: ignore[arg-type]

    def working(self, number: int, *stack: Frame, seq: int, **more: object) -> RankFacts:
        """A rank whose main thread is in these frames, with all collectives up to ``seq`` completed."""
        return self.rank(number, *stack, seq=seq, **more)  # type: ignore[arg-type]

    def finished(self, number: int, *, seq: int, batch: int, **more: object) -> RankFacts:
        """A rank whose Trainer has returned."""
        options = {"phase": Phase.FINISHED, "batch": batch, "last": True} | more
        return self.rank(number, seq=seq, **options)  # type: ignore[arg-type]


GLOO = Backend(name="gloo", runs_ahead=0)
NCCL = Backend(name="nccl", runs_ahead=2)


def unread(facts: RankFacts, *reasons: NotRecorded) -> RankFacts:
    """The same rank, whose main thread computes and of whose collectives nothing is known, as its driver is silent.

    Args:
        facts: The rank.
        reasons: Others why nothing is known, one for each group.
    """
    whys = reasons or (NotRecorded.DRIVER_SILENT,)
    groups = (UnrecordedGroup(name=str(n), why=why, backend="nccl", calls=61) for n, why in enumerate(whys))
    computes = MachineFacts(main_thread=MainThreadFacts(over_s=10.0, looks=10, ran_s=9.9, queued_s=0.0))
    return replace(facts, groups=(), collectives=(), unrecorded=tuple(groups), machine=computes)


def raised(facts: RankFacts, type_: str, message: str, *stack: Frame, consequence: bool = False) -> RankFacts:
    """The same rank, having raised."""
    error = ExceptionFacts(type=type_, message=message, stack=stack, is_consequence=consequence)
    return replace(facts, exception=error)


def transport_error(facts: RankFacts) -> RankFacts:
    """The same rank, having been told by the transport that a peer is gone; nothing is outstanding any more."""
    ended = tuple(replace(entry, completed=True) for entry in facts.collectives)
    message = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337"
    return raised(replace(facts, collectives=ended), "RuntimeError", message, ENGINE, consequence=True)


def process(rank: int, state: str, **more: object) -> ProcessFacts:
    """A rank's process as a neighbour sees it."""
    return ProcessFacts(pid=1000 + rank, rank=rank, state=state, **more)  # type: ignore[arg-type]


def job(
    *ranks: RankFacts,
    world: int = 4,
    witnessed: tuple[ProcessFacts, ...] = (),
    kind: IncidentKind = IncidentKind.SUSPECT,
) -> JobFacts:
    """The ranks that answered, out of ``world``."""
    incident = Incident(number=1, kind=kind, opened_by=1, idle_s=23.0, suspect_after_s=20.0, timeout_s=1800.0)
    return JobFacts(incident=incident, world_size=world, ranks=ranks, witnessed=witnessed)
