"""What a main thread is doing, from its stack, its actions and its outstanding collectives."""

from dataclasses import replace

import pytest
from builders import (
    ALL_REDUCE,
    BARRIER,
    CHECKPOINT_IO,
    DUMP_CHECKPOINT,
    EMPTY_CACHE,
    ENGINE,
    FETCH,
    FLUSH,
    GLOO,
    INFINITE,
    INIT_GROUP,
    MAIN,
    NCCL,
    NEXT,
    NEXT_DATA,
    OPTIMIZER,
    QUEUE_GET,
    RANK_ZERO,
    RUN,
    SIGTERM_ITEM,
    SITE,
    TEARDOWN,
    TENSORBOARD,
    TORCH_SAVE,
    TRY_GET,
    unread,
    user,
)

from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import (
    AwaitedThread,
    Frame,
    MachineFacts,
    MainThreadFacts,
    NotRecorded,
    Phase,
    RankFacts,
    UnrecordedGroup,
)
from lightning_ncclsafe.rules.kit.activity import activity, hook_words, waits_for_silent_device
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.rules.kit.purpose import purpose_words

STEP = user("training_step", 40, code="loss = self.model(x)")
MONITORED = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=5400, function="monitored_barrier")
SHARDED_SAVE = Frame(file=f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", line=500, function="write_data")
PICKLING = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=3000, function="_object_to_tensor")
DDP_FORWARD = Frame(file=f"{SITE}/torch/nn/parallel/distributed.py", line=1600, function="forward")
FETCHER = Frame(file=f"{SITE}/lightning/pytorch/loops/fetchers.py", line=60, function="__next__")
CONNECTOR = Frame(
    file=f"{SITE}/lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py",
    line=118,
    function="log_metrics",
)
WANDB = Frame(file=f"{SITE}/wandb/sdk/wandb_run.py", line=1, function="log")
LOGGING = f"{SITE}/../logging/__init__.py"
HANDLERS = Frame(file=LOGGING, line=1700, function="callHandlers")
SENDS = Frame(file=f"{SITE}/../logging/handlers.py", line=1013, function="emit")
TEXT = Frame(file=LOGGING, line=370, function="getMessage")
HOOK = Frame(file=f"{SITE}/lightning/pytorch/trainer/call.py", line=177, function="_call_lightning_module_hook")
OWN_LOGGER = replace(user("log_histogram", 5), mark=Mark.USER_LOGGER.value)
SWEEP = Frame(file=f"{SITE}/wandb/sdk/launch/agent.py", line=1, function="run")


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        ((ALL_REDUCE,), Kind.COLLECTIVE),
        ((STEP, BARRIER), Kind.COLLECTIVE),
        ((INIT_GROUP,), Kind.STORE),
        ((MONITORED,), Kind.STORE),
        ((INFINITE,), Kind.STORE),
        ((STEP, ALL_REDUCE, PICKLING, user("__getstate__", 3)), Kind.USER),
        ((NEXT_DATA, TRY_GET), Kind.LOADER),
        ((NEXT_DATA, FETCH, user("__getitem__", 5)), Kind.LOADER),
        ((FETCHER, user("__iter__", 5)), Kind.LOADER),
        ((TENSORBOARD, FLUSH), Kind.LOGGER),
        ((CONNECTOR, user("log_metrics", 5)), Kind.LOGGER),
        ((STEP, WANDB), Kind.LOGGER),
        ((STEP, HANDLERS, SENDS), Kind.LOGGER),
        ((STEP, HANDLERS, user("emit", 5)), Kind.LOGGER),
        ((STEP, HANDLERS, user("emit", 5), QUEUE_GET), Kind.USER),
        ((STEP, HANDLERS, TEXT, user("__str__", 5)), Kind.USER),
        ((STEP, RANK_ZERO, OWN_LOGGER), Kind.LOGGER),
        ((STEP, RANK_ZERO, OWN_LOGGER, user("_send", 6)), Kind.LOGGER),
        ((STEP, RANK_ZERO, OWN_LOGGER, ALL_REDUCE), Kind.COLLECTIVE),
        ((TEARDOWN, user("finalize", 5), user("send", 6)), Kind.LOGGER),
        ((TEARDOWN, RANK_ZERO, user("finalize", 5)), Kind.LOGGER),
        ((TEARDOWN, HOOK, user("teardown", 5), user("finalize", 6)), Kind.USER),
        ((TORCH_SAVE,), Kind.CHECKPOINT),
        ((CHECKPOINT_IO, user("write", 5)), Kind.CHECKPOINT),
        ((DUMP_CHECKPOINT, user("on_save_checkpoint", 5), user("tell", 6)), Kind.USER),
        ((DUMP_CHECKPOINT, user("on_save_checkpoint", 5), TORCH_SAVE), Kind.CHECKPOINT),
        ((CHECKPOINT_IO, BARRIER), Kind.COLLECTIVE),
        ((STEP,), Kind.USER),
        ((DDP_FORWARD, STEP), Kind.USER),
        ((Frame(file=f"{SITE}/lightning/pytorch/loops/fit_loop.py", line=1, function="run"),), Kind.LIGHTNING),
    ],
)
def test_kinds_by_stack(stack: tuple[Frame, ...], kind: Kind) -> None:
    assert activity(GLOO.rank(0, *stack, seq=5)).kind is kind


JOIN = Frame(file=f"{SITE}/../threading.py", line=1149, function="join")
THREAD_RUN = Frame(file=f"{SITE}/../threading.py", line=1012, function="run")


def waiting_for(*frames: Frame, main: tuple[Frame, ...] = (STEP, JOIN)) -> RankFacts:
    """A rank whose main thread waits for a thread that is there."""
    return replace(GLOO.rank(0, *main, seq=5), awaited_thread=AwaitedThread(name="writer", stack=(THREAD_RUN, *frames)))


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        ((SHARDED_SAVE, user("write_data", 9)), Kind.CHECKPOINT),
        ((user("write", 8), TORCH_SAVE), Kind.CHECKPOINT),
        ((user("log", 8), TENSORBOARD, FLUSH), Kind.LOGGER),
        ((SHARDED_SAVE, ALL_REDUCE), Kind.COLLECTIVE),
        ((MONITORED,), Kind.STORE),
        ((user("fetch", 8), NEXT_DATA), Kind.USER),
        ((user("step", 8), ENGINE), Kind.USER),
        ((user("upload", 8),), Kind.USER),
        ((), Kind.USER),
    ],
)
def test_the_kind_of_a_rank_that_waits_for_its_thread_is_what_that_one_is_in(
    stack: tuple[Frame, ...], kind: Kind
) -> None:
    doing = activity(waiting_for(*stack))
    assert doing.kind is kind
    assert (doing.place, doing.waits_alone) == (STEP, kind is Kind.USER)


def test_a_thread_that_is_no_longer_awaited_does_not_count() -> None:
    assert activity(waiting_for(TORCH_SAVE, main=(STEP,))).kind is Kind.USER
    assert activity(waiting_for(TORCH_SAVE, main=(STEP, JOIN, user("handler", 4)))).kind is Kind.USER


def test_the_main_threads_own_kind_comes_first() -> None:
    assert activity(waiting_for(TORCH_SAVE, main=(TENSORBOARD, FLUSH, JOIN))).kind is Kind.LOGGER


def test_a_thread_that_saves_predictions_saves_no_checkpoint() -> None:
    waiting = waiting_for(TORCH_SAVE)
    predicts = replace(waiting, progress=replace(waiting.progress, phase=Phase.PREDICT))
    assert activity(predicts).kind is Kind.USER


def test_backward_waits_only_with_a_collective_outstanding() -> None:
    assert activity(GLOO.rank(0, ENGINE, seq=5, outstanding=1)).waits_for_peers
    assert not activity(GLOO.rank(0, ENGINE, seq=5)).waits_for_peers
    assert not activity(GLOO.rank(0, ENGINE, user("backward", 9), seq=5, outstanding=1)).waits_for_peers


def test_an_nccl_collective_in_flight_waits_wherever_the_main_thread_is() -> None:
    doing = activity(NCCL.rank(0, STEP, seq=5, outstanding=1))
    assert (doing.kind, doing.on_device, doing.waits_for_peers) == (Kind.USER, True, True)
    assert activity(NCCL.rank(0, SIGTERM_ITEM, seq=5, outstanding=1)).kind is Kind.COLLECTIVE
    assert not activity(GLOO.rank(0, STEP, seq=5, outstanding=1)).waits_for_peers


def test_the_oldest_outstanding_collective_counts_and_p2p_does_not() -> None:
    facts = NCCL.rank(0, STEP, seq=9, outstanding=3)
    assert activity(facts).collective == facts.collectives[-3]
    p2p = replace(facts, collectives=tuple(replace(entry, is_p2p=True) for entry in facts.collectives))
    assert activity(p2p).collective is None


def test_lightning_waits_for_prepare_data_without_limit() -> None:
    assert activity(GLOO.rank(0, INFINITE, seq=1)).exempt
    assert not activity(GLOO.rank(0, BARRIER, seq=1, outstanding=1)).exempt


def test_what_lies_outside_the_trainer_does_not_count() -> None:
    outside = (SWEEP, replace(MAIN, rank_condition="if local_rank != -1:"), RUN, STEP)
    doing = activity(replace(GLOO.rank(0, STEP, seq=5), stack=outside))
    assert (doing.kind, doing.rank_condition) == (Kind.USER, "")


def test_rank_zero_wrappers_count_around_user_code_only() -> None:
    assert activity(GLOO.rank(0, RANK_ZERO, user("plot", 3), seq=5)).rank_condition == "@rank_zero_only"
    assert activity(GLOO.rank(0, RANK_ZERO, TENSORBOARD, FLUSH, seq=5)).rank_condition == ""


def test_a_condition_inside_the_dataset_is_not_around_the_work() -> None:
    below = user("__getitem__", 5, condition="if rank == 0:")
    assert activity(GLOO.rank(0, NEXT_DATA, FETCH, below, seq=5)).rank_condition == ""


def test_without_a_stack_actions_decide() -> None:
    for fetch in (NEXT, "[_EvaluationLoop].val_next", "[_EvaluationLoop].test_next"):
        assert activity(GLOO.rank(0, seq=5, action=fetch)).kind is Kind.LOADER
    assert activity(GLOO.rank(0, seq=5, action="[Callback]Mine.val_next")).kind is Kind.LIGHTNING
    assert activity(GLOO.rank(0, seq=5, action="save_checkpoint")).kind is Kind.CHECKPOINT
    assert activity(GLOO.rank(0, seq=5, action="barrier:x")).call == "barrier 'x'"
    assert activity(GLOO.rank(0, seq=0, action="init_process_group")).kind is Kind.STORE
    assert activity(GLOO.rank(0, seq=5, outstanding=1)).kind is Kind.COLLECTIVE


def test_a_finished_rank_neither_waits_nor_works() -> None:
    doing = activity(NCCL.rank(0, BARRIER, seq=5, outstanding=1, phase=Phase.FINISHED))
    assert (doing.kind, doing.waits_for_peers) == (Kind.FINISHED, False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("[LightningModule]Net.training_step", "Net.training_step"),
        ("[Callback]ModelCheckpoint{'monitor': None, 'a': {}}.on_validation_end", "ModelCheckpoint.on_validation_end"),
        ("[Callback]main.<locals>.Early{'mode': 'min'}.setup", "Early.setup"),
        ("[Strategy]SafeDDP.backward", "backward"),
        ("[_TrainingEpochLoop].train_dataloader_next", "next(train_dataloader)"),
        ("[_EvaluationLoop].val_next", "next(val_dataloader)"),
        ("barrier:post_setup", "barrier 'post_setup'"),
        ("save_checkpoint", "save_checkpoint"),
    ],
)
def test_hooks_in_words(name: str, words: str) -> None:
    assert hook_words(name) == words


def means(facts: RankFacts) -> str:
    return purpose_words(activity(facts).collective, facts)


def test_meanings() -> None:
    assert means(GLOO.in_sigterm_broadcast(0, seq=5)) == "Lightning's per-batch SIGTERM broadcast"
    assert means(NCCL.in_sigterm_broadcast(0, seq=5)) == "Lightning's per-batch SIGTERM broadcast"
    assert means(GLOO.waiting(0, seq=5)) == "DDP's gradient all-reduce"
    assert means(GLOO.in_barrier(0, "post_setup", seq=5)) == "Lightning's barrier 'post_setup'"
    assert means(GLOO.rank(0, STEP, ALL_REDUCE, seq=5, outstanding=1)) == ""


def test_what_the_users_code_calls_in_what_a_library_calls_is_not_the_librarys() -> None:
    called = (SHARDED_SAVE, ALL_REDUCE), (SHARDED_SAVE, user("write_data", 9), ALL_REDUCE)
    of_library, of_user = (means(GLOO.rank(0, *stack, seq=5, outstanding=1)) for stack in called)
    assert of_library == "torch.distributed.checkpoint's coordination"
    assert of_user == ""


def test_an_older_outstanding_collective_does_not_get_the_purpose_of_the_current_line() -> None:
    """NCCL: the main thread hangs in the SIGTERM broadcast's .item(), because an earlier all_reduce does not end."""
    assert means(NCCL.rank(0, SIGTERM_ITEM, seq=5, outstanding=1, op="all_reduce")) == ""


UNRECORDED = UnrecordedGroup(name="0", why=NotRecorded.NO_ENTRY, backend="gloo", calls=12)
SLEEPS, COMPUTES = MainThreadFacts(over_s=10, ran_s=0.1), MainThreadFacts(over_s=10, ran_s=2.0, queued_s=3.0)
HANDLE = user("training_step", 40, code="work.wait()")


@pytest.mark.parametrize(
    ("stack", "why", "thread", "waits"),
    [
        ((MAIN, RUN, ENGINE), NotRecorded.NO_ENTRY, SLEEPS, True),
        ((MAIN, RUN, ENGINE), NotRecorded.NO_ENTRY, None, True),
        ((MAIN, RUN, ENGINE), NotRecorded.NO_ENTRY, COMPUTES, False),
        ((MAIN, RUN, ENGINE), NotRecorded.LOST, SLEEPS, False),
        ((MAIN, RUN, ENGINE), None, SLEEPS, False),
        ((MAIN, RUN, ENGINE, STEP), NotRecorded.NO_ENTRY, SLEEPS, False),
        ((MAIN, RUN, HANDLE), NotRecorded.UNKNOWN_BACKEND, SLEEPS, True),
        ((MAIN, RUN, HANDLE), None, SLEEPS, False),
    ],
)
def test_without_a_recorder_a_main_thread_that_sleeps_in_backward_waits(
    stack: tuple[Frame, ...], why: NotRecorded | None, thread: MainThreadFacts | None, waits: bool
) -> None:
    facts = replace(
        GLOO.rank(0, *stack, seq=0),
        groups=(),
        collectives=(),
        unrecorded=() if why is None else (replace(UNRECORDED, why=why),),
        machine=MachineFacts(main_thread=thread),
    )
    assert activity(facts).waits_for_peers is waits


READS = user("training_step", 44, code="self.total += loss.item()")


@pytest.mark.parametrize(
    ("stack", "kind", "call"),
    [
        ((TEARDOWN, EMPTY_CACHE), Kind.COLLECTIVE, "what is queued on a GPU"),
        ((OPTIMIZER,), Kind.COLLECTIVE, "what is queued on a GPU"),
        ((STEP, OPTIMIZER), Kind.COLLECTIVE, "what is queued on a GPU"),
        ((READS,), Kind.COLLECTIVE, "what is queued on a GPU"),
        ((ENGINE,), Kind.COLLECTIVE, "the backward pass"),
        ((NEXT_DATA, TRY_GET), Kind.LOADER, "_try_get_data"),
        ((NEXT_DATA, FETCH, user("__getitem__", 5)), Kind.LOADER, "fetch"),
        ((CHECKPOINT_IO, TORCH_SAVE), Kind.CHECKPOINT, "save"),
        ((STEP,), Kind.USER, ""),
        ((DDP_FORWARD, STEP), Kind.USER, ""),
        ((STEP, QUEUE_GET), Kind.USER, ""),
        ((TEARDOWN,), Kind.LIGHTNING, ""),
    ],
)
def test_a_rank_in_code_of_torchs_waits_for_its_device_while_the_driver_is_silent(
    stack: tuple[Frame, ...], kind: Kind, call: str
) -> None:
    doing = activity(unread(NCCL.rank(0, *stack, seq=61)))
    assert (doing.kind, doing.call, doing.waits_for_peers) == (kind, call, kind is Kind.COLLECTIVE)


@pytest.mark.parametrize("stack", [(TEARDOWN, EMPTY_CACHE), (OPTIMIZER,), (READS,), (ENGINE,)])
@pytest.mark.parametrize(
    ("reasons", "waits"),
    [
        ((NotRecorded.DRIVER_SILENT,), True),
        ((NotRecorded.LOST, NotRecorded.DRIVER_SILENT), True),
        ((NotRecorded.LOST,), False),
        ((NotRecorded.NO_ENTRY, NotRecorded.UNKNOWN_BACKEND), False),
        (None, False),
    ],
)
def test_a_rank_waits_for_its_device_only_if_the_driver_is_silent(
    reasons: tuple[NotRecorded, ...] | None, waits: bool, stack: tuple[Frame, ...]
) -> None:
    rank = NCCL.rank(0, *stack, seq=61)
    facts = replace(unread(rank), unrecorded=()) if reasons is None else unread(rank, *reasons)
    assert activity(facts).waits_for_peers is waits
    assert waits_for_silent_device(facts) is waits


def test_a_rank_without_a_stack_is_not_known_to_wait_for_its_device() -> None:
    assert not waits_for_silent_device(unread(NCCL.rank(0, seq=61)))


@pytest.mark.parametrize(
    ("code", "thread", "waits"),
    [
        ("work.wait()", SLEEPS, True),
        ("work.wait()", None, True),
        ("work.wait()", COMPUTES, False),
        ("work.start()", SLEEPS, False),
    ],
)
def test_a_wait_in_the_users_own_line_is_for_a_peer(code: str, thread: MainThreadFacts | None, waits: bool) -> None:
    """As for isend() and irecv(), which gloo does not record; a wait of Python's has a frame of its own."""
    line = user("hand_over", 40, code=code)
    facts = replace(GLOO.rank(0, MAIN, RUN, line, seq=7), machine=MachineFacts(main_thread=thread))
    assert activity(facts).waits_for_peers is waits
    library = Frame(file="/usr/lib/python3.11/threading.py", line=629, function="wait", code="gotit = waiter.wait()")
    assert not activity(replace(facts, stack=(*facts.stack, library))).waits_for_peers


@pytest.mark.parametrize(
    ("stack", "ran_s", "alone"),
    [
        ((STEP, QUEUE_GET), None, True),
        ((STEP,), 0.1, True),
        ((STEP,), 9.0, False),
        ((STEP,), None, False),
        ((STEP, ALL_REDUCE), 0.1, False),
        ((ENGINE,), 0.1, False),
    ],
)
def test_a_rank_that_waits_by_itself(stack: tuple[Frame, ...], ran_s: float | None, alone: bool) -> None:
    """By what the user's line has called, or by a main thread of which is known that it hardly runs."""
    facts = GLOO.working(0, *stack, seq=60)
    thread = MainThreadFacts(over_s=10.0, looks=10, ran_s=ran_s, queued_s=0.0 if ran_s is not None else None)
    assert activity(replace(facts, machine=MachineFacts(main_thread=thread))).waits_alone is alone
