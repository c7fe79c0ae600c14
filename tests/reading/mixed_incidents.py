"""Incidents of jobs that are parallel in several ways at once, each with its truth, which was written first.

Tensor, data and pipeline parallel groups with a batch's sends between stages, experts, hosts that are far ahead, calls
that cross between groups, dumps of different moments and jobs. What was said of them at the first run is in
``docs/cost/accuracy.md``. ``python tests/reading/mixed_incidents.py`` prints what is said now.
"""

import sys
from collections.abc import Callable

from further_incidents import hashed
from written_incidents import (
    ALL,
    CROSSED,
    DEVICE,
    DIFFERENT,
    GONE,
    HOST,
    INCIDENTS,
    NOBODY,
    PAIRS,
    Dumps,
    Schedule,
    all_of,
    batched,
    ddp,
    flat,
    freezing,
    incident,
    layers,
    one_forward_one_backward,
    pipeline,
    ring_of,
    show,
    stages,
    step_of_ddp,
    tensor_and_data,
    tp_dp,
    world,
)
from written_recorder import FOREVER, Batch, Collective, Host, Kernel, Played, Receive, Send, Step, Synchronize

BEFORE = set(INCIDENTS)

# Tensor, data and pipeline parallel at once; rank = tensor + 2 x data + 4 x stage


def groups_of_3d(count: int) -> dict[str, list[int]]:
    groups = {**world(4 * count)}
    for stage in range(count):
        for one in range(2):
            groups[f"tp{one}{stage}"] = [2 * one + 4 * stage, 2 * one + 4 * stage + 1]
            groups[f"dp{one}{stage}"] = [one + 4 * stage, one + 2 + 4 * stage]
    for pipe in range(4):
        groups[f"pp{pipe}"] = [pipe + 4 * stage for stage in range(count)]
    return groups


def programs_of_3d(
    count: int, times: int = 2, batches: int = 4, schedule: Schedule = one_forward_one_backward
) -> dict[int, list[list[Step]]]:
    programs: dict[int, list[list[Step]]] = {}
    for rank in range(4 * count):
        stage, pipe = divmod(rank, 4)
        tensor = f"tp{pipe // 2}{stage}"
        parts = schedule(stage, count, batches, f"pp{pipe}", [pipe + 4 * one for one in range(count)])
        layered = [[one for step in part for one in _layered(step, tensor)] for part in parts]
        end: list[Step] = [Collective(f"dp{pipe % 2}{stage}", sizes=(8192,)), Synchronize()]
        programs[rank] = [*layered, end, [Collective("dp", sizes=(1,)), Synchronize()]] * times
    return programs


def _layered(step: Step, tensor: str) -> list[Step]:
    """A stage's computation, which its tensor-parallel ranks do together."""
    return [step, Collective(tensor, sizes=(2048,))] if isinstance(step, Kernel) else [step]


def played_3d(count: int = 2, schedule: Schedule = one_forward_one_backward, **stuck: int) -> Played:
    return Played(groups_of_3d(count), flat(programs_of_3d(count, schedule=schedule), **stuck))


@incident(HOST, 5)
def three_ways_host_stuck() -> Dumps:
    """Rank 5, of the second stage, in the second round."""
    return all_of(played_3d(r5=13), version="2.9")


@incident(HOST, 2)
def three_ways_of_three_stages() -> Dumps:
    """Rank 2, of the first of three stages, in its warm-up of the second round; only open entries."""
    return all_of(played_3d(3, r2=15), version="2.9", only_active=True)


@incident(HOST, 9)
def three_ways_with_batches() -> Dumps:
    """Rank 9, of the last of three stages; a send and a receive are one launch."""
    return all_of(played_3d(3, batched, r9=12))


@incident(HOST, 1, 6)
def three_ways_two_hosts() -> Dumps:
    """Rank 1 of the first stage and rank 6 of the second, which share no group but the one of all."""
    return all_of(played_3d(r1=12, r6=13))


@incident(HOST, 5)
def three_ways_a_bystander_left_no_dump() -> Dumps:
    """Rank 5 has stopped; rank 2's dump, of another pipeline, was never copied."""
    dumps = all_of(played_3d(r5=13))
    del dumps[2]
    return dumps


@incident(GONE, 5, is_sure=False)
def three_ways_the_culprit_left_no_dump() -> Dumps:
    """Rank 5's own dump is the one that is missing."""
    dumps = all_of(played_3d(r5=13))
    del dumps[5]
    return dumps


@incident(NOBODY)
def three_ways_move() -> Dumps:
    """Healthy; dumps some 20 ms apart."""
    played = Played(groups_of_3d(2), flat(programs_of_3d(2, times=8)))
    return {rank: played.dump(rank, 0.7 + 0.02 * rank) for rank in range(8)}


@incident(NOBODY)
def three_ways_with_batches_move() -> Dumps:
    """Healthy; of three stages, with timing."""
    played = Played(groups_of_3d(3), flat(programs_of_3d(3, times=6, schedule=batched)))
    return {rank: played.dump(rank, 0.9 + 0.01 * (rank % 5), timing=True) for rank in range(12)}


def place_of(programs: dict[int, list[list[Step]]], rank: int, after: int, is_it: Callable[[Step], bool]) -> int:
    """The place, among a rank's launches, of the first one behind some that is it."""
    launches = [
        step
        for part in programs[rank]
        for step in part
        if isinstance(step, Collective | Send | Receive | Batch | Kernel)
    ]
    return next(place for place, step in enumerate(launches) if place >= after and is_it(step))


@incident(DEVICE, 2)
def three_ways_a_device_freezes_in_a_layer() -> Dumps:
    """Rank 2's, in what it does with rank 3."""
    programs = programs_of_3d(2)
    place = place_of(programs, 2, 25, lambda step: isinstance(step, Collective) and step.group == "tp10")
    return all_of(freezing(groups_of_3d(2), flat(programs), 2, place), version="2.9", only_active=True)


@incident((*DEVICE, *ALL, *PAIRS), 6, among=(2,), is_sure=False)
def three_ways_a_device_freezes_in_a_receive() -> Dumps:
    """Rank 6's, in an activation from rank 2, whose send has ended."""
    programs = programs_of_3d(2)
    place = place_of(programs, 6, 25, lambda step: isinstance(step, Receive))
    return all_of(freezing(groups_of_3d(2), flat(programs), 6, place), version="2.9")


@incident(DIFFERENT, 4, 5, among=(0, 1))
def three_ways_sizes_of_a_layer_differ() -> Dumps:
    """Ranks 4 and 5 of the second stage reduce different sizes with each other; which is wrong cannot be said."""
    programs = flat(programs_of_3d(2))
    place = [n for n, one in enumerate(programs[5]) if isinstance(one, Collective) and one.group == "tp01"][10]
    programs[5][place] = Collective("tp01", sizes=(1024,))
    return all_of(Played(groups_of_3d(2), programs))


@incident((*HOST, *DIFFERENT), 1, 6, 7)
def three_ways_a_host_and_a_size() -> Dumps:
    """Rank 1 has stopped; ranks 6 and 7 of the other stage reduce different sizes before they could wait for it."""
    programs = flat(programs_of_3d(2), r1=14)
    place = [n for n, one in enumerate(programs[7]) if isinstance(one, Collective) and one.group == "tp11"][9]
    programs[7][place] = Collective("tp11", sizes=(4096,))
    return all_of(Played(groups_of_3d(2), programs))


@incident((*DIFFERENT, *CROSSED, *HOST, *PAIRS), 7, among=(3,))
def a_stage_skips_its_gradients() -> Dumps:
    """Rank 7 finds its loss not a number, leaves the rest of the step out and begins the next one.

    Rank 3, to which it turns, is where it should be; but so is a rank that has sent once too often and gone on.
    """
    programs = programs_of_3d(2, times=3)
    half = len(programs[7]) // 3
    programs[7] = [*programs[7][: 2 * half - 2], *programs[7][2 * half :]]
    return all_of(Played(groups_of_3d(2), flat(programs)))


# Experts


def groups_of_experts() -> dict[str, list[int]]:
    """Eight ranks; experts are spread over four, and each expert is held by two."""
    groups = {**world(8), "ep0": [0, 1, 2, 3], "ep1": [4, 5, 6, 7]}
    return {**groups, **{f"edp{one}": [one, one + 4] for one in range(4)}}


def experts(rank: int, count: int, number: int = 0) -> list[Step]:
    """Tokens go to their experts and come back, more or fewer by rank."""
    steps: list[Step] = []
    for layer in range(count):
        there = (900 + 31 * rank + 7 * (layer + number),)
        steps += [Kernel(0.002), Collective(f"ep{rank // 4}", "all_to_all", there)]
        steps += [Kernel(0.004), Collective(f"ep{rank // 4}", "all_to_all", (1000 + rank,))]
    return steps


def step_of_experts(rank: int) -> list[Step]:
    rest: list[Step] = [Collective(f"edp{rank % 4}", sizes=(2048,)), Collective("dp", sizes=(512,)), Synchronize()]
    return [*experts(rank, 3), *rest]


def with_experts(**stuck: list[Step]) -> dict[int, list[Step]]:
    programs = {}
    for rank in range(8):
        same = [one for _ in range(3) for one in step_of_experts(rank)]
        programs[rank] = [*same, *stuck.get(f"r{rank}", [*step_of_experts(rank)] * 2)]
    return programs


@incident(HOST, 3)
def between_the_tokens_ways() -> Dumps:
    """Rank 3's host stops between sending its tokens and getting them back."""
    return all_of(Played(groups_of_experts(), with_experts(r3=[*experts(3, 1)[:3], Host(FOREVER)])), version="2.9")


@incident(DEVICE, 2)
def a_device_freezes_among_experts() -> Dumps:
    """Rank 2's, in an all-to-all that has ended on ranks 0, 1 and 3."""
    programs = with_experts()
    launches = [one for one in programs[2] if isinstance(one, Collective | Kernel)]
    place = [n for n, one in enumerate(launches) if isinstance(one, Collective) and one.op == "all_to_all"][20]
    return all_of(freezing(groups_of_experts(), programs, 2, place))


@incident(DIFFERENT, 5)
def an_expert_gathers_in_place_of_an_exchange() -> Dumps:
    """Rank 5 gathers where ranks 4, 6 and 7 exchange."""
    odd: list[Step] = [*experts(5, 1)[:1], Collective("ep1", "all_gather", (1000,)), *step_of_experts(5)]
    return all_of(Played(groups_of_experts(), with_experts(r5=odd)))


@incident(HOST, 0, 6)
def two_hosts_of_different_experts() -> Dumps:
    """One of each group of experts, at different layers."""
    stuck = {"r0": [*experts(0, 1), Host(FOREVER)], "r6": [Kernel(0.001), Host(FOREVER)]}
    return all_of(Played(groups_of_experts(), with_experts(**stuck)), only_active=True)


@incident(NOBODY)
def experts_move() -> Dumps:
    """Healthy; dumps within 40 ms."""
    programs = {rank: [*step_of_experts(rank)] * 20 for rank in range(8)}
    played = Played(groups_of_experts(), programs)
    return {rank: played.dump(rank, 0.3 + 0.005 * rank) for rank in range(8)}


# Calls in another order


@incident(CROSSED, 0, 1)
def layers_and_experts_crossed() -> Dumps:
    """Ranks 0 and 1 call their own group and that of all in different orders; no third rank has both."""
    groups = {**world(4), "tp0": [0, 1], "tp1": [2, 3]}

    def program(rank: int) -> list[Step]:
        pair: list[Step] = [Collective(f"tp{rank // 2}", sizes=(256,)), Collective("dp", sizes=(64,))]
        return [*[*pair, Synchronize()] * 4, *(reversed(pair) if rank == 1 else pair), Synchronize()]

    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}))


@incident(CROSSED, 0, 1, 2, is_sure=False)
def three_groups_in_a_circle() -> Dumps:
    """Each of three ranks calls first what the next one calls second; no two of them disagree."""
    groups = {**world(3), "a": [0, 1], "b": [1, 2], "c": [0, 2]}
    order = {0: ("a", "c"), 1: ("b", "a"), 2: ("c", "b")}
    good = {0: ("a", "c"), 1: ("a", "b"), 2: ("b", "c")}

    def calls(names: tuple[str, ...]) -> list[Step]:
        return [*[Collective(name, sizes=(32,)) for name in names], Synchronize()]

    return all_of(Played(groups, {rank: [*calls(good[rank]) * 3, *calls(order[rank])] for rank in range(3)}))


@incident(NOBODY)
def another_order_that_ends_all_the_same() -> Dumps:
    """Rank 2 launches two groups' calls the other way round, on streams of which neither waits for the other."""
    groups = {**world(4), "metrics": [0, 1, 2, 3]}

    def program(rank: int) -> list[Step]:
        pair: list[Step] = [Collective("dp", is_async=True), Collective("metrics", sizes=(4,), is_async=True)]
        return [*(reversed(pair) if rank == 2 else pair), Synchronize()] * 4

    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}))


@incident(DIFFERENT, 4)
def a_reduction_to_one() -> Dumps:
    """Rank 4 reduces to one rank where all others reduce to all."""
    odd: list[Step] = [Host(0.01), Collective("dp", "reduce", (4096,)), *step_of_ddp()[3:]]
    return all_of(Played(world(8), ddp(8, 4, r4=odd)), version="2.9")


@incident(DIFFERENT, 0, 1, 2, 3)
def each_gathers_what_it_has() -> Dumps:
    """All-gathers of four different sizes: nobody has padded."""

    def program(rank: int) -> list[Step]:
        gather: list[Step] = [Collective("dp", "all_gather", (512,)), Synchronize()]
        return [*gather * 6, Collective("dp", "all_gather", (500 + rank,)), Synchronize()]

    return all_of(Played(world(4), {rank: program(rank) for rank in range(4)}))


@incident(DIFFERENT, 1)
def one_tensor_fewer_in_a_coalesced_call() -> Dumps:
    """Rank 1 scatters three gradients in one launch, the others four."""

    def program(rank: int) -> list[Step]:
        whole = Collective("dp", "reduce_scatter_tensor_coalesced", (512, 256, 128, 64))
        fewer = Collective("dp", "reduce_scatter_tensor_coalesced", (512, 256, 128))
        return [*[whole, Synchronize()] * 5, fewer if rank == 1 else whole, Synchronize()]

    return all_of(Played(world(4), {rank: program(rank) for rank in range(4)}), version="2.9")


@incident(DIFFERENT, 5)
def a_bucket_left_out() -> Dumps:
    """All buckets are alike; rank 5 leaves one out and is at the barrier while others reduce the last one."""
    buckets: list[Step] = [Collective("dp", sizes=(1024,), is_async=True) for _ in range(3)]
    barrier: list[Step] = [Collective("dp", "all_reduce_barrier", (1,)), Synchronize()]

    def program(rank: int) -> list[Step]:
        step: list[Step] = [Kernel(0.01), *buckets, *barrier]
        return [*[*step] * 4, Kernel(0.01), *(buckets[:2] if rank == 5 else buckets), *barrier]

    return all_of(Played(world(8), {rank: program(rank) for rank in range(8)}))


# Sends and receives


@incident((*PAIRS, *DIFFERENT, *HOST), 2, among=(1,))
def one_micro_batch_more() -> Dumps:
    """Rank 2 receives once more than rank 1 has to send; the others are at the gradients."""
    groups = {**world(4), "pp": [0, 1, 2, 3]}
    programs = pipeline(one_forward_one_backward, 4)
    for rank in range(4):
        programs[rank].append([Collective("dp", sizes=(64,)), Synchronize()])
    programs[2].insert(-1, [Receive("pp", 1, is_async=False), Kernel(0.01)])
    return all_of(Played(groups, flat(programs)))


@incident(PAIRS, 3, among=(0, 1, 2))
def a_receive_from_the_wrong_stage() -> Dumps:
    """Rank 3 receives from rank 1 what rank 2 sends it."""

    def forward(rank: int, source: int | None = None) -> list[Step]:
        steps: list[Step] = [Receive("pp", rank - 1 if source is None else source, is_async=False)] if rank else []
        return [*steps, Kernel(0.01), *([Send("pp", rank + 1)] if rank < 3 else [])]

    programs = {rank: [one for _ in range(5) for one in forward(rank)] for rank in range(4)}
    for rank in range(4):
        programs[rank] += [*forward(rank, 1 if rank == 3 else None), Synchronize()]
    return all_of(Played(stages(4), programs))


@incident((*PAIRS, *DIFFERENT), 0, 1)
def sizes_of_a_batch_differ() -> Dumps:
    """Ranks 0 and 1 exchange in one launch each; what rank 0 sends is not what rank 1 expects."""

    def program(rank: int, last: int) -> list[Step]:
        def both(size: int) -> list[Step]:
            parts = (Send("x", 1 - rank, size), Receive("x", 1 - rank, 4096))
            return [Batch(parts, is_async=False), Synchronize()]

        return [*both(4096) * 5, *both(last)]

    return all_of(Played({"x": [0, 1]}, {0: program(0, 2048), 1: program(1, 4096)}))


@incident((*DEVICE, *ALL, *PAIRS), 1, among=(0,), is_sure=False)
def two_stages_a_device_freezes_in_a_batch() -> Dumps:
    """Rank 1's, in an exchange with rank 0."""
    programs = pipeline(batched, 2)
    place = place_of(programs, 1, 14, lambda step: isinstance(step, Batch))
    return all_of(freezing(stages(2), flat(programs), 1, place), version="2.9")


@incident((*DEVICE, *ALL, *PAIRS), 2, among=(0, 1, 3), is_sure=False)
def ring_attention_device_freezes() -> Dumps:
    """Rank 2's, in the middle of a ring."""
    programs: dict[int, list[Step]] = {rank: [*ring_of(rank, 4, 12), Synchronize()] for rank in range(4)}
    return all_of(freezing({"cp": [0, 1, 2, 3]}, programs, 2, 13))


@incident(HOST, 2)
def a_ring_beside_data() -> Dumps:
    """Ring attention among four of eight, and gradients among all; rank 2 stops in a ring of the second step."""
    groups = {**world(8), "cp0": [0, 1, 2, 3], "cp1": [4, 5, 6, 7]}

    def rings(rank: int, count: int) -> list[Step]:
        mine = groups[f"cp{rank // 4}"]
        after, before = mine[(rank + 1) % 4], mine[(rank - 1) % 4]
        parts = (Send(f"cp{rank // 4}", after), Receive(f"cp{rank // 4}", before))
        return [one for _ in range(count) for one in (Kernel(0.003), Batch(parts, is_async=False))]

    def program(rank: int) -> list[Step]:
        step: list[Step] = [*rings(rank, 3), Collective("dp", sizes=(4096,)), Synchronize()]
        return [*step * 2, *([*rings(rank, 2), Host(FOREVER)] if rank == 2 else step * 2)]

    return all_of(Played(groups, {rank: program(rank) for rank in range(8)}))


# Hosts far ahead of their devices


@incident(DEVICE, 3)
def hosts_far_ahead_of_a_stuck_device() -> Dumps:
    """Nobody synchronizes: hosts have launched 60 steps; rank 3's device hangs in a kernel of the fifth."""
    programs = {rank: [one for _ in range(60) for one in step_of_ddp(sync=False)] for rank in range(8)}
    programs[3].insert(5 * 8, Kernel(FOREVER))
    for rank in programs:
        programs[rank].append(Synchronize())
    return all_of(Played(world(8), programs), timing=True)


@incident(HOST, 4)
def rings_have_wrapped() -> Dumps:
    """Rank 4 has stopped; hosts ahead of their devices have launched more than the ten entries that are kept."""
    programs = ddp(8, 3, sync=False, r4=[Host(FOREVER)])
    for rank in range(8):
        if rank != 4:
            programs[rank] += [*step_of_ddp(sync=False)] * 2
    played = Played(world(8), {rank: [*steps, Synchronize()] for rank, steps in programs.items()})
    return {rank: played.dump(rank, ring=10) for rank in range(8)}


@incident(NOBODY)
def hosts_far_ahead() -> Dumps:
    """Healthy: hosts launch without ever waiting, some faster than others."""
    programs = {}
    for rank in range(4):
        one: list[Step] = [Host(0.002 * rank), *step_of_ddp(sync=False)[1:]]
        programs[rank] = [step for _ in range(40) for step in one]
    played = Played(world(4), programs)
    return {rank: played.dump(rank, 0.35 + 0.001 * rank) for rank in range(4)}


@incident(DEVICE, 2, is_sure=False)
def a_straggler_looks_stuck() -> Dumps:
    """Rank 2 computes for four seconds in each step, for which the others wait; the job moves.

    Dumps do not say when they were taken: within these seconds they look as if its device hung.
    """
    programs = {rank: [*([Kernel(4.0)] if rank == 2 else []), *step_of_ddp()] * 8 for rank in range(4)}
    played = Played(world(4), programs)
    return {rank: played.dump(rank, 15.0 + 0.01 * rank, timing=True) for rank in range(4)}


@incident(ALL, 2, 3)
def a_pair_that_never_ends() -> Dumps:
    """Ranks 2 and 3 have both launched a layer's reduction, which never ends; all others wait behind them."""
    programs = tp_dp(2, 4, {2: [*layers(2, 2, 1), Kernel(FOREVER), *layers(2, 2, 3), *layers(2, 2, 1)]})
    return all_of(Played(tensor_and_data(2, 4), programs), version="2.9")


@incident(HOST, 2, 3)
def two_hosts_stuck_at_one_place() -> Dumps:
    """Ranks 2 and 3 of eight have both stopped before the same call."""
    return all_of(Played(world(8), ddp(8, 4, r2=[Host(FOREVER)], r3=[Host(FOREVER)])))


@incident(HOST, 5)
def roots_are_far_ahead() -> Dumps:
    """Rank 0 has pushed five broadcasts, of which rank 5 never came to the first."""

    def program(rank: int) -> list[Step]:
        pushed: list[Step] = [Collective("dp", "broadcast", (64 + n,), root=0) for n in range(5)]
        good: list[Step] = [*pushed, Synchronize()]
        rest: list[Step] = [*pushed, Collective("dp", sizes=(8,)), Synchronize()]
        return [*good * 3, *([Host(FOREVER)] if rank == 5 else rest)]

    return all_of(Played(world(8), {rank: program(rank) for rank in range(8)}))


@incident(HOST, 3)
def a_first_call_of_a_subgroup() -> Dumps:
    """Rank 3 never makes the first call with rank 1, whose host is blocked inside; ranks 0 and 2 wait for these."""

    def program(rank: int) -> list[Step]:
        first: list[Step] = [Collective(f"dp{rank % 2}", sizes=(8192,)), Synchronize()]
        return [*layers(rank, 2, 4), Synchronize(), *([Host(FOREVER)] if rank == 3 else [*first, *layers(rank, 2, 2)])]

    return all_of(Played(tensor_and_data(2, 2), {rank: program(rank) for rank in range(4)}, connects=True))


# Dumps of different moments, jobs and names


@incident(HOST, 5)
def dumps_as_each_times_out() -> Dumps:
    """Each rank dumps when it times out, 20 s after one another; the culprit when it is told to."""
    played = Played(world(8), ddp(8, 4, r5=[Host(FOREVER)]))
    return {rank: played.dump(rank, 1300.0 if rank == 5 else 600.0 + 20.0 * rank) for rank in range(8)}


@incident(HOST, 5)
def one_dump_of_before_the_hang() -> Dumps:
    """Rank 1's dump was taken while all still moved; the others' are of ten minutes later."""
    played = Played(world(8), ddp(8, 12, r5=[Host(FOREVER)]))
    return {rank: played.dump(rank, 0.3 if rank == 1 else 700.0) for rank in range(8)}


@incident(HOST, 6, is_sure=False)
def two_ranks_have_dumps_of_another_job() -> Dumps:
    """Ranks 0 and 1 have dumps of a healthy job of a day later; rank 6's says that it waits for nothing."""
    dumps = all_of(Played(world(8), ddp(8, 9, r6=[Host(FOREVER)])))
    later = Played(world(8), ddp(8, 30))
    return dumps | {rank: later.dump(rank, 1.0, clock_s=86_400.0) for rank in (0, 1)}


@incident(HOST, 5, is_sure=False)
def names_of_each_process_and_members_unknown() -> Dumps:
    """Names of one group differ between its members, and who they are is not written; rank 5 waits for nothing."""
    groups = tensor_and_data(2, 4)
    programs = tp_dp(2, 4, {5: [*layers(5, 2, 1), Host(FOREVER)]})
    return all_of(Played(groups, programs), names=hashed(groups), has_config=False)


@incident(HOST, 3)
def names_crossed_between_processes() -> Dumps:
    """Rank 1 has made its two groups in the other order, so each bears the other's name there; members are written."""
    groups = {**world(4), "a": [0, 1, 2, 3], "b": [0, 1, 2]}

    def program(rank: int) -> list[Step]:
        step: list[Step] = [Collective("a", sizes=(64,)), *([Collective("b", sizes=(32,))] if rank < 3 else [])]
        return [*[*step, Synchronize()] * 4, *([Host(FOREVER)] if rank == 3 else [*step, Synchronize()])]

    names = {"a": "1", "b": "2", (1, "a"): "2", (1, "b"): "1"}
    return all_of(Played(groups, {rank: program(rank) for rank in range(4)}), names=names)


@incident(HOST, 2)
def an_early_format_that_has_wrapped() -> Dumps:
    """No status, no members, eight entries."""
    played = Played(world(4), ddp(4, 8, r2=[Host(FOREVER)]))
    return all_of(played, version="2.3", has_status=False, has_config=False, threads=False, ring=8)


MIXED = tuple(name for name in INCIDENTS if name not in BEFORE)

if __name__ == "__main__":
    show(sys.argv[1:] or MIXED)
