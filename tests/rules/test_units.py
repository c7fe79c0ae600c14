"""A blocked collective's size told as a bucket, an FSDP unit or a parameter, and its place in a step."""

from dataclasses import replace

import pytest
from builders import (
    BACKWARD,
    BROADCAST,
    ENGINE,
    GLOO,
    NCCL,
    SIGTERM_ITEM,
    SITE,
    TRAINING_STEP,
    Backend,
    job,
    user,
)

from lightning_ncclsafe.facts import Collective, Frame, JobFacts, ModelUnit, Phase, RankFacts, UnitKind
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.activity import activity
from lightning_ncclsafe.rules.kit.purpose import matches, purpose_words, unit_words

# Of the Llama-recipes report: Llama 3 8B with three tokens added, on four ranks.
TAKEN_IN, GIVEN_OUT = 262_675_456, 1_050_701_824
ROOT = ModelUnit(
    kind=UnitKind.FSDP_UNIT,
    parameters=("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    parameter_count=3,
    elements=128_259 * 4096 * 2 + 4096,
    shard_elements=(128_259 * 4096 * 2 + 4096) // 4,
    size_bytes=2 * GIVEN_OUT,
    groups=("0",),
    is_root=True,
)
LAYERS = ModelUnit(
    kind=UnitKind.FSDP_UNIT,
    name="model.layers.0",
    last="model.layers.31",
    alike=32,
    parameters=("model.layers.0.mlp.weight",),
    parameter_count=9,
    elements=218_112_000,
    shard_elements=54_528_000,
)
BUCKET = ModelUnit(
    kind=UnitKind.DDP_BUCKET,
    name="1 of 3",
    parameters=("layers.7.out.weight", "layers.7.out.bias", "layers.4.norm.weight", "layers.4.norm.bias"),
    parameter_count=32,
    elements=6_250_000,
    size_bytes=25_000_000,
)
WEIGHT = ModelUnit(kind=UnitKind.PARAMETER, name="layers.0.w1", elements=4096, shard_elements=1024, parameter_count=1)
FSDP = f"{SITE}/torch/distributed/fsdp"
PRE_FORWARD = Frame(file=f"{FSDP}/_fully_shard/_fsdp_state.py", line=9, function="_pre_forward")
PRE_BACKWARD = Frame(file=f"{FSDP}/_runtime_utils.py", line=9, function="_pre_backward_hook")
STATE_DICT = Frame(file=f"{FSDP}/_state_dict_utils.py", line=9, function="_full_pre_state_dict_hook")
GATHER_ALL = Frame(file=f"{SITE}/torchmetrics/utilities/distributed.py", line=9, function="gather_all_tensors")
CLIP = Frame(file=f"{SITE}/torch/nn/utils/clip_grad.py", line=9, function="clip_grad_norm_")
TENSOR = Frame(file=f"{SITE}/torch/distributed/tensor/_redistribute.py", line=9, function="redistribute_local_tensor")


def call(op: str, given: int, taken: int = 0, *, group: str = "0", backend: str = "nccl") -> Collective:
    sizes: dict[str, tuple[tuple[int, ...], ...]] = {"input_sizes": ((given,),), "output_sizes": ((taken or given,),)}
    return Collective(group=group, seq=61, op=op, backend=backend, dtypes=("BFloat16",), **sizes)


GATHER = call("_allgather_base", TAKEN_IN, GIVEN_OUT)
REDUCE = call("_reduce_scatter_base", GIVEN_OUT, TAKEN_IN)


def waiting(entry: Collective, *stack: Frame, units: tuple[ModelUnit, ...], rank: int = 0, **more: object) -> RankFacts:
    """A rank with this collective outstanding, in training_step of batch 20 unless told otherwise."""
    net = NCCL if entry.backend == "nccl" else GLOO
    options = {"seq": 61, "outstanding": 1, "batch": 20, "action": TRAINING_STEP} | more
    facts = net.rank(rank, *stack, **options)  # type: ignore[arg-type]
    return replace(facts, collectives=(*facts.collectives[:-1], entry), units=units)


def means(facts: RankFacts) -> str:
    return purpose_words(activity(facts).collective, facts)


@pytest.mark.parametrize(
    ("unit", "entry"),
    [
        (ROOT, GATHER),
        (ROOT, call("all_gather", TAKEN_IN, GIVEN_OUT)),
        (ROOT, REDUCE),
        (ROOT, call("all_reduce", GIVEN_OUT, backend="gloo")),
        (ROOT, call("all_reduce", TAKEN_IN)),
        (BUCKET, call("all_reduce", 6_250_000)),
        (WEIGHT, call("all_gather_into_tensor", 1024, 4096)),
        (WEIGHT, call("all_reduce", 4096)),
    ],
)
def test_sizes_that_fit(unit: ModelUnit, entry: Collective) -> None:
    assert matches(unit, entry)


@pytest.mark.parametrize(
    ("unit", "entry"),
    [
        (ROOT, call("_allgather_base", TAKEN_IN, GIVEN_OUT, group="tp")),
        (ROOT, call("_allgather_base", TAKEN_IN, TAKEN_IN * 8)),
        (ROOT, call("_reduce_scatter_base", TAKEN_IN, TAKEN_IN // 4)),
        (ROOT, call("broadcast", GIVEN_OUT)),
        (BUCKET, call("all_reduce", 6_250_001)),
        (BUCKET, call("_allgather_base", 6_250_000, 25_000_000)),
        (BUCKET, call("_reduce_scatter_base", 6_250_000, 1)),
        (BUCKET, call("broadcast", 6_250_000)),
        (BUCKET, call("barrier", 0)),
        (WEIGHT, call("all_reduce", 1024)),
    ],
)
def test_sizes_that_do_not_fit(unit: ModelUnit, entry: Collective) -> None:
    assert not matches(unit, entry)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            waiting(GATHER, PRE_FORWARD, units=(ROOT,)),
            "the all-gather of the root FSDP unit (model.embed_tokens, model.norm, lm_head), in forward",
        ),
        (
            waiting(GATHER, ENGINE, PRE_BACKWARD, units=(ROOT,)),
            "the all-gather of the root FSDP unit (model.embed_tokens, model.norm, lm_head), in backward",
        ),
        (
            waiting(GATHER, STATE_DICT, units=(ROOT,)),
            "the all-gather of the root FSDP unit (model.embed_tokens, model.norm, lm_head), for a checkpoint",
        ),
        (
            waiting(REDUCE, user("training_step", 3), units=(ROOT,)),
            "the reduction of the gradients of the root FSDP unit (model.embed_tokens, model.norm, lm_head), "
            "in backward",
        ),
        (
            waiting(call("_allgather_base", 54_528_000, 218_112_000), PRE_FORWARD, units=(LAYERS,)),
            "the all-gather of one of 32 FSDP units of this size (model.layers.0 … model.layers.31), in forward",
        ),
        (
            waiting(
                call("_allgather_base", 54_528_000, 218_112_000), units=(replace(LAYERS, alike=1),), action=BACKWARD
            ),
            "the all-gather of FSDP unit model.layers.0, in backward",
        ),
        (
            waiting(call("all_reduce", 6_250_000), ENGINE, units=(BUCKET,)),
            "DDP's gradient all-reduce of bucket 1 of 3 (layers.7 … layers.4, 25.0 MB), in backward",
        ),
        (
            waiting(
                call("all_reduce", 40), ENGINE, units=(replace(BUCKET, name="1 of 1", elements=40, size_bytes=160),)
            ),
            "DDP's gradient all-reduce of its only bucket (layers.7 … layers.4, 160 bytes), in backward",
        ),
        (
            waiting(call("all_gather_into_tensor", 1024, 4096), TENSOR, units=(WEIGHT,), action="save_checkpoint"),
            "the all-gather of parameter layers.0.w1, for a checkpoint",
        ),
    ],
)
def test_units_in_words(facts: RankFacts, words: str) -> None:
    assert means(facts) == words


def test_two_units_of_one_size_are_not_told_apart() -> None:
    other = replace(BUCKET, name="2 of 3", groups=("0",))
    assert unit_words(call("all_reduce", 6_250_000), waiting(GATHER, units=(BUCKET, other))) == ""


def test_a_unit_is_sent_by_any_back_end_of_its_group() -> None:
    unit = replace(BUCKET, groups=("0",))
    on_cpu, elsewhere = (call("all_reduce", 6_250_000, group=name, backend="gloo") for name in ("0:gloo", "1"))
    assert unit_words(on_cpu, waiting(on_cpu, units=(unit,))) != ""
    assert unit_words(elsewhere, waiting(elsewhere, units=(unit,))) == ""


def test_a_unit_with_one_parameter_is_named_as_a_parameter_in_a_checkpoint() -> None:
    entry = call("all_gather_into_tensor", 1024, 4096)
    alone = ModelUnit(kind=UnitKind.FSDP_UNIT, name="layers.0", elements=4096, shard_elements=1024)
    in_step, saving = (
        waiting(entry, units=(alone, WEIGHT), action=name) for name in (TRAINING_STEP, "save_checkpoint")
    )
    assert means(in_step) == "the all-gather of FSDP unit layers.0, in forward"
    assert means(saving) == "the all-gather of parameter layers.0.w1, for a checkpoint"


def test_a_unique_size_counts_more_than_the_line_of_a_main_thread_that_does_not_wait() -> None:
    entry = replace(GATHER, seq=60)
    facts = waiting(call("broadcast", 1), SIGTERM_ITEM, units=(ROOT,), outstanding=2)
    older = replace(facts, collectives=(entry, *facts.collectives[-1:]))
    assert means(older) == "the all-gather of the root FSDP unit (model.embed_tokens, model.norm, lm_head)"


def test_a_small_size_counts_less_than_the_line() -> None:
    flag = ModelUnit(kind=UnitKind.DDP_BUCKET, name="1 of 1", parameters=("scale",), parameter_count=1, elements=1)
    early = Frame(file=f"{SITE}/lightning/pytorch/callbacks/early_stopping.py", line=9, function="_run_early_stopping")
    facts = waiting(call("all_reduce", 1, backend="gloo"), early, BROADCAST, units=(flag,))
    assert means(facts) == "EarlyStopping's vote on whether to stop"


def test_a_small_unit_says_more_than_that_fsdp_exchanges_something() -> None:
    small = replace(LAYERS, elements=40, shard_elements=10, alike=1)
    facts = waiting(call("all_gather", 10, 40, backend="gloo"), PRE_FORWARD, units=(small,))
    assert means(facts) == "the all-gather of FSDP unit model.layers.0, in forward"


def test_metrics_and_the_norm_of_gradients() -> None:
    metric = ModelUnit(kind=UnitKind.METRIC, name="val_acc", type="MulticlassAccuracy")
    entry = call("all_gather", 10, 20, backend="gloo")
    assert means(waiting(entry, GATHER_ALL, units=(metric,))) == "torchmetrics' sync of MulticlassAccuracy (val_acc)"
    assert means(waiting(entry, GATHER_ALL, units=())) == "a torchmetrics sync (gather_all_tensors)"
    two = (metric, replace(metric, name="val_f1", type="MulticlassF1Score"))
    assert means(waiting(entry, GATHER_ALL, units=two)) == "a torchmetrics sync (gather_all_tensors)"
    assert means(waiting(entry, PRE_FORWARD, units=(metric,))) == "FSDP's parameter or gradient exchange"
    norm = waiting(call("all_reduce", 1), CLIP, TENSOR, units=())
    assert means(norm) == "the norm of all gradients (clip_grad_norm_)"


def llama(net: Backend, *, stack: tuple[Frame, ...] = (PRE_FORWARD,), action: str = TRAINING_STEP) -> JobFacts:
    """The Llama-recipes case: rank 1 has fewer batches and is done, the others are in the next one."""
    entry = call("_allgather_base", TAKEN_IN, GIVEN_OUT, backend=net.name)
    others = (waiting(entry, *stack, units=(ROOT,), rank=rank, action=action) for rank in (0, 2, 3))
    ranks = {1: net.finished(1, seq=60, batch=19)} | {facts.rank: facts for facts in others}
    return job(*(ranks[rank] for rank in range(4)))


@pytest.mark.parametrize("net", [GLOO, NCCL], ids=lambda net: net.name)
def test_the_llama_recipes_case(net: Backend) -> None:
    finding = judge(llama(net)).findings[0]
    assert (finding.rule, finding.ranks) == ("uneven-batches", (1,))
    assert (
        "Ranks 0, 2-3 wait in the all-gather of the root FSDP unit (model.embed_tokens, model.norm, lm_head), "
        "in forward (_allgather_base, sequence number 61, 262,675,456 elements of BFloat16): "
        "these ranks have started another forward pass." in finding.summary
    )


@pytest.mark.parametrize(
    ("stack", "action"), [((ENGINE, PRE_BACKWARD), BACKWARD), ((STATE_DICT,), "save_checkpoint"), ((), BACKWARD)]
)
def test_no_forward_pass_is_seen_in_backward_or_a_checkpoint(stack: tuple[Frame, ...], action: str) -> None:
    said = judge(llama(NCCL, stack=stack, action=action)).findings[0].summary
    assert "the root FSDP unit" in said
    assert "another forward pass" not in said


def test_the_first_forward_pass_is_not_another_one() -> None:
    first = waiting(GATHER, PRE_FORWARD, units=(ROOT,), batch=0)
    late = NCCL.working(1, user("training_step", 40), seq=60, action=TRAINING_STEP, batch=0)
    assert "forward pass" not in judge(job(first, late, world=2)).findings[0].summary


@pytest.mark.parametrize(("batch", "is_another"), [(20, False), (19, True)])
def test_a_rank_that_is_late_for_the_same_forward_pass_is_not_a_pass_behind(batch: int, is_another: bool) -> None:
    early = waiting(GATHER, PRE_FORWARD, units=(ROOT,))
    late = NCCL.working(1, user("training_step", 40), seq=60, action=TRAINING_STEP, batch=batch)
    said = judge(job(early, late, world=2)).findings[0].summary
    assert ("this rank has started another forward pass" in said) is is_another


def test_diverged_calls_are_named() -> None:
    flagged = NCCL.in_sigterm_broadcast(1, seq=61, batch=21)
    bucket = (waiting(call("all_reduce", 6_250_000), ENGINE, units=(BUCKET,), rank=rank) for rank in (0, 2, 3))
    ranks = {1: flagged} | {facts.rank: facts for facts in bucket}
    finding = judge(job(*(ranks[rank] for rank in range(4)))).findings[0]
    assert finding.rule == "diverged-collectives"
    assert (
        "Ranks 0, 2-3 called all_reduce (6,250,000 elements of BFloat16) for DDP's gradient all-reduce of bucket 1 of "
        "3 (layers.7 … layers.4, 25.0 MB), in backward and rank 1 called broadcast" in finding.summary
    )


def test_ranks_without_units_are_worded_as_before() -> None:
    assert means(GLOO.waiting(0, seq=5)) == "DDP's gradient all-reduce"
    assert means(waiting(GATHER, PRE_FORWARD, units=(), phase=Phase.TRAIN)) == "FSDP's parameter or gradient exchange"
