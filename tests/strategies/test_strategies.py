"""SafeDDP as users make it: by hand, by name, from a configuration; and what one fit leaves behind."""

import copy
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jsonargparse
import lightning as L
import pytest
import torch
import torch.distributed as dist
from guard_of import guard_of
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from torch.nn.parallel import DistributedDataParallel
from warm import Warm

from lightning_ncclsafe import CollectiveTimeoutError, HostPreflight, SafeDDP, SafeFSDP, SafeModelParallel
from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.loaders.collecting import Stage
from lightning_ncclsafe.loaders.iteration import replaceable
from lightning_ncclsafe.settings import AgreementSettings, Limits
from lightning_ncclsafe.strategies import features, guarded, guarded_call
from lightning_ncclsafe.strategies.guarded import GuardedStrategy, timer_of

ONE_DEVICE = Path(__file__).with_name("one_device.py")


def configured(base: type, class_path: str = "lightning_ncclsafe.SafeDDP", **init_args: Any) -> Any:
    """The strategy that a configuration file of LightningCLI would make."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "strategy")
    given = {"strategy": {"class_path": class_path, "init_args": init_args}}
    return parser.instantiate(parser.parse_object(given)).strategy


def test_it_is_a_ddp_strategy() -> None:
    assert isinstance(SafeDDP(), DDPStrategy)


def test_arguments_of_ddp_strategy_are_handed_on() -> None:
    strategy = SafeDDP(
        timeout=timedelta(seconds=90),
        start_method="spawn",
        process_group_backend="gloo",
        find_unused_parameters=True,
    )
    stock = DDPStrategy(
        timeout=timedelta(seconds=90),
        start_method="spawn",
        process_group_backend="gloo",
        find_unused_parameters=True,
    )
    assert {name: vars(strategy)[name] for name in ("_timeout", "_start_method", "_ddp_kwargs")} == {
        name: vars(stock)[name] for name in ("_timeout", "_start_method", "_ddp_kwargs")
    }
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert strategy.process_group_backend == "gloo"


@pytest.mark.parametrize("base", [DDPStrategy, Strategy])
def test_it_is_made_from_plain_types(base: type) -> None:
    strategy = configured(
        base,
        suspect_after=30,
        timeout="0:10:00",
        on_timeout="report",
        report_dir="reports",
        start_method="fork",
        find_unused_parameters=True,
    )
    assert type(strategy) is SafeDDP
    asked = guard_of(strategy)
    assert asked.limits == Limits(suspect_after_s=30.0, timeout_s=600.0, on_timeout="report")
    assert strategy._timeout == timedelta(minutes=10)
    assert strategy._start_method == "fork"
    assert os.fspath(asked.report_dir or "") == "reports"
    # The parser fills in the defaults of torch's class, here as there.
    stock = configured(base, "lightning.pytorch.strategies.DDPStrategy", find_unused_parameters=True)
    assert strategy._ddp_kwargs == stock._ddp_kwargs
    assert strategy._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.parametrize(
    ("suspect_after", "seconds"), [("0:00:45", 45.0), (1.5, 1.5), ("90 seconds", None), (None, 60.0)]
)
def test_a_duration_in_a_configuration(suspect_after: Any, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(jsonargparse.ArgumentError, match="suspect_after"):
            configured(DDPStrategy, suspect_after=suspect_after)
    else:
        assert guard_of(configured(DDPStrategy, suspect_after=suspect_after)).limits.suspect_after_s == seconds


def test_an_empty_configuration_is_the_default() -> None:
    assert guard_of(configured(DDPStrategy)).limits == guard_of(SafeDDP()).limits


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("on_timeout", "kill", r"(?s)on_timeout.*'abort', 'report'"),
        ("suspect_after", [1], "suspect_after"),
        ("suspect_afterwards", 1, "suspect_afterwards"),
        ("start_method", "thread", "start_method"),
    ],
)
def test_a_wrong_type_in_a_configuration_is_named_by_the_parser(argument: str, value: Any, said: str) -> None:
    with pytest.raises(jsonargparse.ArgumentError, match=said):
        configured(DDPStrategy, **{argument: value})


def test_a_wrong_value_in_a_configuration_is_named_by_us() -> None:
    with pytest.raises(ValueError, match=r"suspect_after=-5\.0 must be longer than 0 s"):
        configured(DDPStrategy, suspect_after=-5)


def test_a_configuration_is_written_and_read_again() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    arguments = {"suspect_after": 30, "timeout": "0:10:00", "on_timeout": "report"}
    given = {"strategy": {"class_path": "lightning_ncclsafe.SafeDDP", "init_args": arguments}}
    text = parser.dump(parser.parse_object(given))
    assert guard_of(parser.instantiate(parser.parse_string(text)).strategy).limits == Limits(
        suspect_after_s=30.0, timeout_s=600.0, on_timeout="report"
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_strategy_that_has_not_begun_can_be_copied_and_sent(copied: Any) -> None:
    strategy = SafeDDP(suspect_after=5, on_timeout="report", report_dir="here", find_unused_parameters=True)
    twin = copied(strategy)
    assert type(twin) is SafeDDP
    assert guard_of(twin)[:2] == guard_of(strategy)[:2]
    assert twin._ddp_kwargs == strategy._ddp_kwargs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_a_copy_of_a_strategy_is_guarded_and_has_its_own_gate(copied: Any, start_method: Any, tmp_path: Path) -> None:
    """Libraries copy what a Trainer is to be made with; so does whoever logs it."""
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=SafeDDP(start_method=start_method), logger=False)
    strategy = trainer.strategy
    io = strategy.checkpoint_io
    twin = copied(strategy)
    guard_of(strategy).ending.close(lambda: CollectiveTimeoutError("ended"))
    with pytest.raises(CollectiveTimeoutError):
        io.save_checkpoint({}, tmp_path / "one.ckpt")
    twin.checkpoint_io.save_checkpoint({}, tmp_path / "two.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["two.ckpt"]
    # Each launches for itself.
    assert type(twin.launcher) is type(strategy.launcher)
    assert vars(twin.launcher)["launch"].args == (twin.launcher,)
    assert vars(strategy.launcher)["launch"].args == (strategy.launcher,)


def test_a_checkpoint_io_that_is_used_again_belongs_to_the_latest_strategy(tmp_path: Path) -> None:
    io = TorchCheckpointIO()
    ended, next_one = (SafeDDP(checkpoint_io=io) for _ in range(2))
    assert ended.checkpoint_io is io
    guard_of(ended).ending.close(lambda: CollectiveTimeoutError("ended"))
    next_one.checkpoint_io.save_checkpoint({}, tmp_path / "it.ckpt")
    next_one.checkpoint_io.remove_checkpoint(tmp_path / "it.ckpt")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("ours", "theirs"), [(SafeDDP, DDPStrategy), (SafeFSDP, FSDPStrategy)])
def test_every_name_of_the_parents_is_registered_for_the_child_too(ours: Any, theirs: Any) -> None:
    own = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is ours}
    stock = {name: entry for name, entry in StrategyRegistry.items() if entry["strategy"] is theirs}
    assert {f"{name}_ncclsafe": entry["init_params"] for name, entry in stock.items()} == {
        name: entry["init_params"] for name, entry in own.items()
    }
    assert stock and not any(name.endswith("ncclsafe") for name in stock)


def test_names_give_the_strategies_that_they_say() -> None:
    notebook = StrategyRegistry.get("ddp_notebook_find_unused_parameters_true_ncclsafe")
    assert (type(notebook), notebook._start_method) == (SafeDDP, "fork")
    assert notebook._ddp_kwargs == {"find_unused_parameters": True}
    offloading = StrategyRegistry.get("fsdp_cpu_offload_ncclsafe")
    assert (type(offloading), offloading.cpu_offload.offload_params) == (SafeFSDP, True)


def test_a_package_that_is_loaded_twice_registers_once() -> None:
    before, known = dict(StrategyRegistry), [*FSDPStrategy.get_registered_strategies()]
    for strategy in (SafeDDP, SafeFSDP):
        strategy.register_strategies(StrategyRegistry)
    assert set(StrategyRegistry) == set(before)
    assert FSDPStrategy.get_registered_strategies() == known


def test_by_name_fsdp_is_refused_without_a_gpu_in_lightnings_words() -> None:
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        L.Trainer(accelerator="cpu", devices=2, strategy="fsdp_ncclsafe")


PAIRS = [(SafeDDP, DDPStrategy), (SafeFSDP, FSDPStrategy), (SafeModelParallel, ModelParallelStrategy)]
OWN_ARGUMENTS = ["suspect_after", "on_timeout", "report_dir", "phase_timeouts", "sigterm_broadcast"]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_configuration_may_say_all_that_the_parent_takes(ours: type, theirs: type) -> None:
    def arguments(strategy: type) -> dict[str, Any]:
        path = f"{strategy.__module__}.{strategy.__qualname__}"
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(Strategy, "strategy")
        return parser.parse_object({"strategy": {"class_path": path}}).strategy.init_args.as_dict()

    own, stock = arguments(ours), arguments(theirs)
    assert [*own] == [*OWN_ARGUMENTS, *stock]
    assert {name: own[name] for name in stock} == stock


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_guard_stands_before_the_strategy_and_hides_nothing_of_it(ours: type, theirs: type) -> None:
    assert ours.__mro__[1:3] == (GuardedStrategy, theirs)
    plugged = {name for name in vars(GuardedStrategy) if callable(getattr(GuardedStrategy, name))}
    replaced = {name for name in plugged if name in dir(theirs) and not name.startswith("__")}
    # All that is plugged in calls on: into Lightning's class, which may have replaced it itself and not call its own.
    assert replaced == {
        "_configure_launcher",
        "backward",
        "barrier",
        "lightning_module_state_dict",
        "on_exception",
        "optimizer_state",
        "optimizer_step",
        "predict_step",
        "process_dataloader",
        "register_strategies",
        "remove_checkpoint",
        "save_checkpoint",
        "setup_environment",
        "test_step",
        "training_step",
        "validation_step",
    }
    # Of these one comes to every batch of evaluation, and to every loader: nobody below may go past it.
    never_called = {"validation_step", "test_step", "predict_step", "process_dataloader"}
    between = theirs.__mro__[: theirs.__mro__.index(ParallelStrategy)]
    assert not never_called & {name for kind in between for name in vars(kind)}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_arguments_by_position_are_the_parents(ours: Any, theirs: Any) -> None:
    values = (2, 1) if ours is SafeModelParallel else (None, None)
    names = ("_data_parallel_size", "_tensor_parallel_size") if ours is SafeModelParallel else ("_accelerator",)
    own, stock = ours(*values, suspect_after=5), theirs(*values)
    assert guard_of(own).limits.suspect_after_s == 5
    assert all(getattr(own, name) == getattr(stock, name) for name in names)


@pytest.mark.parametrize("strategy", ["SafeFSDP", "SafeModelParallel"])
def test_without_a_launcher_the_trainers_functions_are_still_watched(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun Lightning's own have none."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    guarded = {"SafeFSDP": SafeFSDP, "SafeModelParallel": SafeModelParallel}[strategy]()
    guarded.cluster_environment = LightningEnvironment()
    assert guarded.cluster_environment.creates_processes_externally
    guarded._configure_launcher()
    watched: list[Any] = []

    @contextmanager
    def watch(trainer: Any) -> Iterator[None]:
        watched.append(trainer)
        yield

    monkeypatch.setattr(guarded, "watch", watch)

    class Trainer:
        strategy = guarded

        def fit(self, *args: int, much: bool) -> Any:
            assert watched == [self] and much
            return args

    trainer = Trainer()
    assert guarded.launcher is not None and guarded.launcher.is_interactive_compatible
    assert guarded.launcher.launch(trainer.fit, 1, 2, trainer=trainer, much=True) == (1, 2)
    guarded.launcher.kill(15)


@pytest.fixture(scope="module")
def outcomes(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """What ``one_device.py`` says, and what it prints to the user: with our strategy and, beside it, the stock one."""

    def outcome(kind: str) -> tuple[dict[str, Any], str]:
        folder = tmp_path_factory.mktemp(kind)
        codes, output = warm.run([str(ONE_DEVICE), kind, str(folder)], folder, timeout_s=50)
        assert codes == [0], output
        said, _, told = output.rstrip().rpartition("\n")
        return json.loads(told), said

    return {kind: outcome(kind) for kind in ("safe", "stock")}


@pytest.fixture
def safe(outcomes: dict[str, tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    return outcomes["safe"]


@pytest.fixture
def stock(outcomes: dict[str, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    return outcomes["stock"][0]


def changes(seen: dict[str, Any]) -> dict[str, Any]:
    """What is other after the fit than before it."""
    before, after = seen["before"], seen["after"]
    return {
        "environment": sorted(
            name
            for name in {*before["environment"], *after["environment"]}
            if before["environment"].get(name) != after["environment"].get(name)
        ),
        **{name: sorted((Counter(after[name]) - Counter(before[name])).elements()) for name in ("threads", "files")},
        **{name: (before[name], after[name]) for name in ("caught", "handlers") if before[name] != after[name]},
    }


def test_a_healthy_fit_prints_one_line_and_leaves_no_report(safe: tuple[dict[str, Any], str]) -> None:
    seen, said = safe
    ours = [line for line in said.splitlines() if "ncclsafe" in line]
    # The script fits three times: with the strategy, with its name, which says the same, and with limits of phases.
    assert len(ours) == 2, said
    asks = "reports a wait that is unusually long for its phase (10 s or more), aborts after 1800 s"
    assert all(line.startswith(f"[ncclsafe] watching 1 rank: {asks}") for line in ours)
    assert "(init 50 s, first_batch 200 s, train 100 s, checkpoint 1200 s)" in ours[1]
    assert seen["steps"] == 2
    assert seen["made"] == []


def test_the_process_group_has_the_timeout_of_the_phase_and_after_the_fit_its_own(
    safe: tuple[dict[str, Any], str],
) -> None:
    assert safe[0]["timeouts"] == {
        "setup": [65],
        "batch": [215, 115],
        "epoch end": [115],
        "checkpoint": [1215],
        "saved": [115],
        "after": [1815],
    }


def test_a_fit_leaves_nothing_that_a_stock_one_does_not(
    safe: tuple[dict[str, Any], str], stock: dict[str, Any]
) -> None:
    left = changes(safe[0])
    assert left == changes(stock)
    assert not [thread for thread in left["threads"] if "ncclsafe" in thread]
    assert safe[0]["profiler"] == stock["profiler"]


def test_with_lightning_there_the_name_is_registered_and_the_others_are_as_they_were(
    safe: tuple[dict[str, Any], str],
) -> None:
    registered = safe[0]["registered"]
    assert registered["ddp_ncclsafe"] == safe[0]["by_name"] == "SafeDDP"
    assert registered["fsdp_ncclsafe"] == "SafeFSDP"
    assert registered["ddp"] == registered["ddp_find_unused_parameters_true"] == "DDPStrategy"


def test_a_strategy_that_is_being_watched_can_be_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a datamodule that knows its Trainer is, when a loader spawns its workers."""
    monkeypatch.setattr(guarded, "GuardedCall", MagicMock())
    strategy = SafeDDP()
    with strategy.watch(MagicMock()):
        assert timer_of(strategy) is not None
        assert timer_of(pickle.loads(pickle.dumps(strategy))) is None


@pytest.mark.parametrize(("strategy", "communicates"), [(SafeDDP, False), (SafeFSDP, True), (SafeModelParallel, True)])
def test_a_split_model_is_presented_as_one_that_needs_all_ranks_for_each_batch(
    strategy: Any, communicates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 1})
    facts = Stage(name="predict_dataloader", expected=0).facts(object(), strategy(), AgreementSettings())
    assert facts.forward_communicates is communicates
    assert (facts.data_rank, facts.data_ranks) == (1, 2)


@pytest.mark.parametrize(
    ("given", "named"),
    [([], []), ([torch.ones(1)], ["list"]), (iter(()), ["tuple_iterator"])],
    ids=["", "list", "stream"],
)
def test_an_empty_list_is_no_loader_and_a_placeholder_has_the_name_of_its_loader(
    given: Any, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafeDDP, "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 1})
    stage = Stage(name="val_dataloader", loaders=[replaceable(given)])
    facts = stage.facts(object(), SafeDDP(), AgreementSettings())
    assert [loader.loader for loader in facts.loaders] == named


@pytest.mark.parametrize(
    ("module", "communicates"), [(torch.nn.BatchNorm1d(3), True), (torch.nn.Linear(3, 1), False)], ids=["buffers", ""]
)
def test_a_model_whose_buffers_ddp_sends_is_presented_as_such(
    module: torch.nn.Module, communicates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each forward pass, also one that evaluates: ranks have to evaluate the same number of batches."""
    monkeypatch.setattr(SafeDDP, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    strategy = SafeDDP()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        strategy.model = DistributedDataParallel(module)
        facts = Stage(name="val_dataloader", expected=0).facts(object(), strategy, AgreementSettings())
    finally:
        dist.destroy_process_group()
    assert facts.forward_communicates is communicates


def test_a_preflight_sees_the_environment_as_it_was_before_the_recorder_got_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks in a thread of its own, on some ranks while the process group is made and on others after that."""
    looks: list[Any] = []
    seen: dict[str, Any] = {}
    monkeypatch.setattr(features, "Preflight", lambda look, **_: looks.append(look) or SimpleNamespace(begin=bool))
    monkeypatch.setattr(features._host, "get", lambda **given: seen.update(given))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SafeDDP(),
        logger=False,
        enable_checkpointing=False,
        callbacks=[HostPreflight()],
    )
    call = guarded_call.GuardedCall(
        trainer,
        Limits(suspect_after_s=1, timeout_s=2, on_timeout="abort"),
        None,
        ending=Ending(),
        combined=object,
        sigterm_error=None,
    )
    call.features.begin(guarded_call.Place(rank=0, local_rank=0, world_size=1, local_world_size=1, master_port="1"))
    before = dict(os.environ)
    with recorders.of_size(7):
        looks[0]()
        assert dict(os.environ) != before
    assert dict(seen["environment"]) == before
