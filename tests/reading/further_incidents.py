"""More incidents, written when ``written_incidents`` had been judged, and without sight of what judges them.

Groups of different sizes that form chains, virtual stages of a pipeline, many dumps missing or older, names that
each process makes for itself, a rank that came back. Each truth was written before the first run here as well; what was
said then is in ``docs/cost/accuracy.md``. ``python tests/reading/further_incidents.py`` prints what is said now.
"""

import copy
import sys

from written_incidents import (
    CROSSED,
    DEVICE,
    DIFFERENT,
    GONE,
    HOST,
    INCIDENTS,
    NOBODY,
    PAIRS,
    Dumps,
    all_of,
    ddp,
    flat,
    freezing,
    incident,
    layers,
    one_forward_one_backward,
    pipelines_and_data,
    show,
    step_of_ddp,
    tensor_and_data,
    tp_dp,
    world,
)
from written_recorder import FOREVER, Collective, Host, Kernel, Played, Receive, Send, Step, Synchronize

BEFORE = set(INCIDENTS)

# Groups of different members


def chain() -> dict[str, list[int]]:
    """Three groups that share one rank each, beside the one of all ranks, which every job has."""
    return {**world(8), "a": [0, 1, 2], "b": [2, 3, 4, 5, 6], "c": [6, 7]}


def along(rank: int, count: int) -> list[Step]:
    steps: list[Step] = []
    for _ in range(count):
        for name, members in chain().items():
            if rank in members and name != "dp":
                steps += [Kernel(0.003), Collective(name, sizes=(640,))]
        steps.append(Synchronize())
    return steps


def chained(**stuck: list[Step]) -> Played:
    return Played(chain(), {rank: [*along(rank, 4), *stuck.get(f"r{rank}", along(rank, 4))] for rank in range(8)})


@incident(HOST, 7)
def the_end_of_a_chain() -> Dumps:
    """Rank 6 waits for rank 7, ranks 2 to 5 for rank 6, and the rest for rank 2."""
    return all_of(chained(r7=[Host(FOREVER)]))


@incident(HOST, 7)
def the_end_of_a_chain_of_which_a_link_is_missing() -> Dumps:
    """The same without rank 6's dump; rank 7's says that it has nothing to wait for."""
    dumps = all_of(chained(r7=[Host(FOREVER)]))
    del dumps[6]
    return dumps


@incident(GONE, 7)
def the_end_of_a_chain_has_left_nothing() -> Dumps:
    """Rank 7's dump is the one that is missing."""
    dumps = all_of(chained(r7=[Host(FOREVER)]))
    del dumps[7]
    return dumps


@incident(HOST, 0)
def the_beginning_of_a_chain() -> Dumps:
    """Rank 0: ranks 1 and 2 wait for it, and all others behind rank 2."""
    return all_of(chained(r0=[Kernel(0.001), Host(FOREVER)]), only_active=True)


@incident(HOST, 9, 12)
def two_of_a_mesh_of_sixteen() -> Dumps:
    """Four by four: two ranks that share no group."""
    stuck: dict[int, list[Step]] = {9: [*layers(9, 4, 2), Host(FOREVER)], 12: [Host(FOREVER)]}
    return all_of(Played(tensor_and_data(4, 4), tp_dp(4, 4, stuck)), version="2.9")


@incident(HOST, 3)
def half_of_the_hosts_left_dumps() -> Dumps:
    """Sixteen ranks, of which ranks 0 to 7 and rank 12 have dumps; rank 3's says that it waits for nothing."""
    dumps = all_of(Played(tensor_and_data(2, 8), tp_dp(2, 8, {3: [Host(FOREVER)]})))
    return {rank: dump for rank, dump in dumps.items() if rank < 8 or rank == 12}


@incident(NOBODY)
def the_host_of_the_culprit_left_no_dumps() -> Dumps:
    """Rank 11 stopped; of ranks 8 to 15 there is nothing, so any of these may have."""
    dumps = all_of(Played(world(16), ddp(16, 4, r11=[Host(FOREVER)])))
    return {rank: dump for rank, dump in dumps.items() if rank < 8}


@incident(HOST, 3)
def tied_embeddings() -> Dumps:
    """First and last stage share a group for their embeddings; the last one never comes to it."""
    groups = {"pp": [0, 1, 2, 3], "embedding": [0, 3]}
    programs = {}
    for stage in range(4):
        one = [step for part in one_forward_one_backward(stage, 4, 6, "pp", [0, 1, 2, 3]) for step in part]
        tied: list[Step] = [Collective("embedding", sizes=(5120,)), Synchronize()] if stage in (0, 3) else []
        last: list[Step] = [Host(FOREVER)] if stage == 3 else tied
        programs[stage] = [*one, *tied, *one, *last]
    return all_of(Played(groups, programs))


# Different calls


@incident(DIFFERENT, 1)
def two_buckets_in_place_of_three() -> Dumps:
    """Rank 1 has fewer parameters, and with them another division into buckets."""
    two: list[Step] = [Kernel(0.02), Collective("dp", sizes=(4096,)), Collective("dp", sizes=(1536,)), Synchronize()]
    return all_of(Played(world(4), ddp(4, 3, r1=two)))


@incident(DIFFERENT, 3)
def another_layer_is_prefetched() -> Dumps:
    """Fully sharded: rank 3 gathers the parameters of two layers in the other order."""
    groups = {**world(8), "fsdp": list(range(8))}

    def program(rank: int) -> list[Step]:
        sizes = [512, 768, 1024, 640]
        same = [one for _ in range(3) for one in step(sizes)]
        return [*same, *step([512, 1024, 768, 640] if rank == 3 else sizes)]

    def step(sizes: list[int]) -> list[Step]:
        gathers: list[Step] = [Collective("fsdp", "all_gather", (size,), is_async=True) for size in sizes]
        scatters: list[Step] = [Collective("fsdp", "reduce_scatter", (8 * size,), is_async=True) for size in sizes]
        return [*gathers, Kernel(0.02), *scatters[::-1], Synchronize()]

    return all_of(Played(groups, {rank: program(rank) for rank in range(8)}))


@incident((*DIFFERENT, *CROSSED, *HOST), 5)
def no_tokens_for_the_experts() -> Dumps:
    """Rank 5 has no tokens and leaves its experts' all-to-all out; it waits with the rest of the world elsewhere."""
    groups = {**world(8), "ep0": [0, 1, 2, 3], "ep1": [4, 5, 6, 7]}

    def program(rank: int) -> list[Step]:
        experts: list[Step] = [Kernel(0.002), Collective(f"ep{rank // 4}", "all_to_all", (900 + rank,))]
        whole: list[Step] = [*experts, *experts, *step_of_ddp()]
        return [*[*whole] * 3, *([*experts, *step_of_ddp()] if rank == 5 else whole)]

    return all_of(Played(groups, {rank: program(rank) for rank in range(8)}), version="2.9")


@incident(PAIRS, 1, among=(0, 2, 3))
def a_send_to_the_wrong_stage() -> Dumps:
    """Rank 1 sends what is rank 2's to rank 3."""
    groups = {"pp": [0, 1, 2, 3]}

    def forward(rank: int, to: int | None = None) -> list[Step]:
        steps: list[Step] = [Receive("pp", rank - 1, is_async=False)] if rank else []
        steps.append(Kernel(0.01))
        return [*steps, Send("pp", to if to is not None else rank + 1)] if rank < 3 else steps

    programs = {rank: [one for _ in range(5) for one in forward(rank)] for rank in range(4)}
    for rank in range(4):
        programs[rank] += [*forward(rank, 3 if rank == 1 else None), Synchronize()]
    return all_of(Played(groups, programs))


# Virtual stages


def virtual(rank: int, ranks: int, batches: int, chunks: int = 2) -> list[list[Step]]:
    """Forward passes through chunks of layers that go around the ranks, as of an interleaved schedule."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    parts: list[list[Step]] = []
    for chunk in range(chunks):
        for _ in range(batches):
            is_first, is_last = rank == 0 and chunk == 0, rank == ranks - 1 and chunk == chunks - 1
            got: list[Step] = [] if is_first else [Receive("pp", before, is_async=False)]
            sent: list[Step] = [] if is_last else [Send("pp", after)]
            parts.append([*got, Kernel(0.01), *sent])
    return [*parts, [Collective("dp", sizes=(64,)), Synchronize()]]


def around(ranks: int = 4, times: int = 3) -> tuple[dict[str, list[int]], dict[int, list[list[Step]]]]:
    return {**world(ranks), "pp": list(range(ranks))}, {one: virtual(one, ranks, 4) * times for one in range(ranks)}


@incident(HOST, 2)
def virtual_stages_host_stuck() -> Dumps:
    """Rank 2 stops in the second chunk of the third round."""
    groups, programs = around()
    return all_of(Played(groups, flat(programs, r2=24)), version="2.9")


@incident(HOST, 0)
def virtual_stages_between_chunks() -> Dumps:
    """Rank 0 stops between its chunks, after what it had to send."""
    groups, programs = around()
    return all_of(Played(groups, flat(programs, r0=13)), version="2.4", threads=False)


@incident(NOBODY)
def virtual_stages_move() -> Dumps:
    """Healthy; dumps some 30 ms apart."""
    groups, programs = around(times=6)
    played = Played(groups, flat(programs))
    return {rank: played.dump(rank, 0.4 + 0.03 * rank) for rank in range(4)}


@incident((*DEVICE, "all-joined", *PAIRS), 3, among=(0, 1, 2), is_sure=False)
def virtual_stages_device_freezes() -> Dumps:
    """Rank 3's, in the middle; others wait for it around the ring."""
    groups, programs = around()
    return all_of(freezing(groups, flat(programs), 3, 30), version="2.10")


# Dumps as they come


def hashed(groups: dict[str, list[int]]) -> dict[object, str]:
    """Names that each process has made by how many groups it had so far."""
    return {(rank, name): f"{7919 * (rank % 3 + 1) + n:x}" for n, name in enumerate(groups) for rank in groups[name]}


@incident(HOST, 5)
def names_that_each_process_makes() -> Dumps:
    """Names of one group differ between its members; only the members are the same."""
    groups = tensor_and_data(2, 4)
    return all_of(Played(groups, tp_dp(2, 4, {5: [*layers(5, 2, 1), Host(FOREVER)]})), names=hashed(groups))


@incident((*HOST, *GONE, "out-of-step"), 2)
def a_rank_that_came_back() -> Dumps:
    """Rank 2's process was started again alone: its numbers begin at 1, its clock goes on."""
    dumps = all_of(Played(world(4), ddp(4, 10, r2=[Host(FOREVER)])))
    dumps[2] = Played(world(4), ddp(4, 1, r2=[Host(FOREVER)])).dump(2, clock_s=2.0)
    return dumps


@incident(HOST, 1)
def the_second_host_left_older_dumps() -> Dumps:
    """Ranks 4 to 7 have dumps of a day before; rank 1's says that it waits for nothing."""
    dumps = all_of(Played(world(8), ddp(8, 9, r1=[Host(FOREVER)])))
    old = Played(world(8), ddp(8, 3, r6=[Host(FOREVER)]))
    return dumps | {rank: old.dump(rank, clock_s=-86_400.0) for rank in range(4, 8)}


@incident(HOST, 6)
def a_clock_two_hours_behind() -> Dumps:
    """The second host's clock is wrong by two hours; rank 6, which is on it, has stopped."""
    played = Played(world(8), ddp(8, 6, r6=[Host(FOREVER)]))
    return {rank: played.dump(rank, clock_s=-7200.0 if rank > 3 else 0.0) for rank in range(8)}


@incident(HOST, 1)
def one_short_ring() -> Dumps:
    """Rank 3 keeps five entries, the others all."""
    played = Played(world(8), ddp(8, 6, sync=False, r1=[Host(FOREVER)]))
    return {rank: played.dump(rank, ring=5 if rank == 3 else 2000) for rank in range(8)}


@incident(DEVICE, 2)
def timing_on_some_hosts() -> Dumps:
    """Rank 2's device never comes to what the others have started; four of eight have start events."""
    programs = ddp(8, 4, r2=[Host(0.01), Kernel(FOREVER), *step_of_ddp()])
    played = Played(world(8), programs)
    return {rank: played.dump(rank, timing=rank < 4) for rank in range(8)}


@incident(HOST, 6)
def two_limits() -> Dumps:
    """Tensor-parallel groups were given up long before data-parallel ones."""
    dumps = all_of(Played(tensor_and_data(2, 4), tp_dp(2, 4, {6: [*layers(6, 2, 2), Host(FOREVER)]})), only_active=True)
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry["timeout_ms"] = 180_000 if entry["process_group"][1].startswith("tp") else 600_000
            if entry["timeout_ms"] == 180_000:
                entry["retired"] = True
                status = dump["pg_status"][str(entry["pg_id"])]
                status["last_completed_collective"] = entry["collective_seq_id"]
    return dumps


@incident(HOST, 3)
def the_back_end_of_new_torch() -> Dumps:
    """Entries say nccl2."""
    dumps = all_of(Played(world(4), ddp(4, 4, r3=[Host(FOREVER)])))
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "nccl2:")
    return dumps


@incident(HOST, 4, as_json=True)
def json_without_status_or_groups() -> Dumps:
    """Numbers as texts in the entries as well, and neither a status nor members."""
    dumps = all_of(Played(world(8), ddp(8, 4, r4=[Host(FOREVER)])), has_status=False, has_config=False)
    for dump in dumps.values():
        for entry in dump["entries"]:
            for key in ("collective_seq_id", "op_id", "pg_id", "record_id", "time_created_ns"):
                entry[key] = str(entry[key])
    return dumps


@incident(NOBODY)
def works_that_nobody_waits_for() -> Dumps:
    """Healthy: asynchronous reductions on a stream of their own, some of which are under way."""
    groups = {**world(4), "ema": [0, 1, 2, 3]}
    step: list[Step] = [*step_of_ddp(), Collective("ema", sizes=(99_999,), is_async=True, takes_s=0.05)]
    played = Played(groups, {rank: [*step] * 8 for rank in range(4)})
    return {rank: played.dump(rank, 0.4) for rank in range(4)}


@incident(NOBODY)
def a_pipeline_whose_dumps_are_of_one_host() -> Dumps:
    """Healthy: of eight ranks four have dumps, which are some 50 ms apart."""
    groups, programs = pipelines_and_data()
    played = Played(groups, flat(programs))
    return {rank: played.dump(rank, 0.25 + 0.05 * rank) for rank in range(4)}


@incident(HOST, 2)
def the_same_dump_twice() -> Dumps:
    """Rank 1's dump lies there under the name of rank 3 as well, as somebody has copied it wrongly."""
    dumps = all_of(Played(world(4), ddp(4, 4, r2=[Host(FOREVER)])))
    return dumps | {3: copy.deepcopy(dumps[1])}


FURTHER = tuple(name for name in INCIDENTS if name not in BEFORE)

if __name__ == "__main__":
    show(sys.argv[1:] or FURTHER)
