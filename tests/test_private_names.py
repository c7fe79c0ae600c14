"""Private names of torch and Lightning that are used: each is listed here, and exists with the arguments it is given.

CUDA builds import without a GPU, so that NCCL's are checked there, too.
"""

import ast
import importlib
import inspect
import multiprocessing
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from parsed import nodes_of

import lightning_ncclsafe
from lightning_ncclsafe._lightning import chosen
from lightning_ncclsafe._torch import build

HERE = Path(lightning_ncclsafe.__file__).parent
OWN_OF_TORCH = [*(HERE / "_torch").glob("*.py")]
CHOSEN = chosen()
TORCH = Version(torch.__version__)
HAS_NCCL = dist.is_nccl_available()

c10d: Any = build.c10d
distributed: Any = dist.distributed_c10d


def calls(name: str, *arguments: object) -> Callable[[], object]:
    """A function of torch's C++ part that can be called while there is nothing."""
    return lambda: getattr(c10d, name)(*arguments)


def takes(module: str, path: str, *arguments: object) -> Callable[[], object]:
    """A function or class of Python that takes these arguments, whose names are not given."""

    def check() -> None:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        inspect.signature(found).bind(*arguments)  # type: ignore[arg-type]

    return check


def has(owner: Callable[[], object], name: str) -> Callable[[], object]:
    return lambda: getattr(owner(), name)


def said_in(module: str, name: str) -> Callable[[], object]:
    """An attribute of instances: a module's source says it."""

    def check() -> None:
        text = inspect.getsource(importlib.import_module(module))
        assert re.search(rf"\b{name}\b", text), f"{module} does not mention {name}"

    return check


def no_check() -> None:
    """Nothing of torch's, or one of several names, of which others are checked."""


LOADERS, FSDP = "torch.utils.data.dataloader", "torch.distributed.fsdp"
OF_TORCH: dict[str, Callable[[], object]] = {
    # Flight Recorder
    "_distributed_c10d": lambda: importlib.import_module("torch._C._distributed_c10d"),
    "_dump_fr_trace_json": calls("_dump_fr_trace_json", False, False),
    "_dump_fr_trace": calls("_dump_fr_trace", True, True, False),
    "_dump_nccl_trace_json": calls("_dump_nccl_trace_json", False, False) if HAS_NCCL else no_check,
    "_dump_nccl_trace": calls("_dump_nccl_trace", True, True, False) if HAS_NCCL else no_check,
    "_inductor": takes("torch._inductor.codecache", "PyCodeCache.stack_frames_for_code", "x.py", 1),
    "_enable_collectives_timing": has(lambda: dist.ProcessGroup, "_enable_collectives_timing"),
    "_get_op_type": has(lambda: dist.Work, "_get_op_type"),
    "_get_sequence_number_for_group": has(lambda: dist.ProcessGroup, "_get_sequence_number_for_group"),
    # Groups
    "_get_default_store": takes("torch.distributed.distributed_c10d", "_get_default_store"),
    "_set_pg_timeout": takes("torch.distributed.distributed_c10d", "_set_pg_timeout", timedelta(), None),
    "_world": lambda: (distributed._world.pg_map, distributed._world.pg_group_ranks),
    "_get_backend": has(lambda: dist.ProcessGroup, "_get_backend"),
    "_device_types": has(lambda: dist.ProcessGroup, "_device_types"),
    "_timeout": lambda: [options()._timeout.total_seconds() for options in options_of_backends()],
    # Loaders
    **{
        name: said_in(LOADERS, name)
        for name in [
            "_base_seed",
            "_get_iterator",
            "_pin_memory_thread",
            "_task_info",
            "_worker_pids_set",
            "_workers",
        ]
    },
    "_MultiProcessingDataLoaderIter": takes(LOADERS, "_MultiProcessingDataLoaderIter", None),
    "_SingleProcessDataLoaderIter": takes(LOADERS, "_SingleProcessDataLoaderIter", None),
    "_utils": lambda: importlib.import_module(LOADERS)._utils.python_exit_status,
    "_shutdown_workers": takes(LOADERS, "_MultiProcessingDataLoaderIter._shutdown_workers", None),
    "_try_put_index": takes(LOADERS, "_MultiProcessingDataLoaderIter._try_put_index", None),
    "_try_get_data": takes(LOADERS, "_MultiProcessingDataLoaderIter._try_get_data", None, 1.0),
    "_remove_worker_pids": lambda: importlib.import_module(f"{LOADERS}")._utils.signal_handling._remove_worker_pids,
    "_set_worker_signal_handlers": said_in(
        "torch.utils.data._utils.worker", "signal_handling._set_worker_signal_handlers()"
    ),
    # DDP
    "_DEFAULT_FIRST_BUCKET_BYTES": lambda: c10d._DEFAULT_FIRST_BUCKET_BYTES + 1,
    "_compute_bucket_assignment_by_size": calls("_compute_bucket_assignment_by_size", [torch.ones(1)], [1, 2]),
    "_module_parameters": said_in("torch.nn.parallel.distributed", "_module_parameters"),
    "_bucket_config": said_in("torch.nn.parallel.distributed", "_bucket_config")
    if Version("2.14") <= TORCH
    else no_check,
    # Tensors and modules
    "_version": has(lambda: torch.Tensor, "_version"),
    # What torch.save calls tensors by.
    "_rebuild_tensor_v2": takes("torch._utils", "_rebuild_tensor_v2", None, 0, (1,), (1,), False, {}),
    "_rebuild_parameter": takes("torch._utils", "_rebuild_parameter", None, True, {}),
    "_foreach_copy_": lambda: torch._foreach_copy_([torch.ones(1)], [torch.ones(1)]),
    "_buffers": said_in("torch.nn.modules.module", "_buffers"),
    "_extra_state": said_in("torch.nn.modules.module", "_extra_state"),
    "_parameters": said_in("torch.nn.modules.module", "_parameters"),
    "_non_persistent_buffers_set": said_in("torch.nn.modules.module", "_non_persistent_buffers_set"),
    # FSDP and FSDP2
    "_handle": said_in(f"{FSDP}.fully_sharded_data_parallel", "_handle"),
    "_inter_node_pg": said_in(f"{FSDP}._init_utils", "_inter_node_pg"),
    **{name: said_in(f"{FSDP}._flat_param", name) for name in ("_fqns", "_sharded_size", "_unpadded_unsharded_size")},
    **{
        name: said_in(f"{FSDP}._flat_param", name)
        for name in ("_local_shard", "_params", "_shapes", "_shard_param_infos", "_shared_param_infos")
    },
    "_fsdp_wrapped_module": said_in(f"{FSDP}._common_utils", "_fsdp_wrapped_module"),
    "_get_fsdp_state": has(lambda: importlib.import_module(FSDP).FSDPModule, "_get_fsdp_state"),
    "_fsdp_param_group": said_in(f"{FSDP}._fully_shard._fsdp_state", "_fsdp_param_group"),
    "_fsdp_param_groups": said_in(f"{FSDP}._fully_shard._fsdp_state", "_fsdp_param_groups")
    if Version("2.12") <= TORCH
    else no_check,
    **{
        name: said_in(f"{FSDP}._fully_shard._fsdp_param_group", name)
        for name in (
            "_is_hsdp",
            "_all_gather_process_group",
            "_reduce_scatter_process_group",
            "_all_reduce_process_group",
        )
    },
    "_module_info": said_in(f"{FSDP}._fully_shard._fsdp_param", "_module_info"),
    "_local_tensor": said_in("torch.distributed.tensor", "_local_tensor")
    if "_local_tensor" in inspect.getsource(importlib.import_module("torch.distributed.tensor"))
    else said_in("torch.distributed.tensor._api", "_local_tensor"),
    # Distributed checkpoints
    "_StorageInfo": takes("torch.distributed.checkpoint.filesystem", "_StorageInfo", "__0_0.distcp", 0, 1),
    "_json": no_check,  # the end of a dump's name
}
OF_LIGHTNING: dict[str, Callable[[], object]] = {
    "_SubprocessScriptLauncher": takes(
        f"{CHOSEN}.strategies.launchers", "_SubprocessScriptLauncher.launch", None, no_check
    ),
    "_MultiProcessingLauncher": takes(
        f"{CHOSEN}.strategies.launchers", "_MultiProcessingLauncher.launch", None, no_check
    ),
    "_checkpoint_io": said_in(f"{CHOSEN}.strategies.strategy", "_checkpoint_io"),
    "_signal_connector": said_in(f"{CHOSEN}.trainer.trainer", "_signal_connector"),
    "_original_handlers": said_in(f"{CHOSEN}.trainer.connectors.signal_connector", "_original_handlers"),
    "_registered_strategies": said_in(f"{CHOSEN}.trainer.connectors.accelerator_connector", "_registered_strategies"),
    "_configure_launcher": takes(f"{CHOSEN}.strategies", "ParallelStrategy._configure_launcher", None),
    "_terminate_all": said_in(
        "lightning.fabric.strategies.launchers.subprocess_script"
        if CHOSEN.startswith("lightning.")
        else "lightning_fabric.strategies.launchers.subprocess_script",
        "_terminate_all",
    ),
    "_logger_connector": said_in(f"{CHOSEN}.trainer.trainer", "_logger_connector"),
    "_TunerExitException": has(
        lambda: importlib.import_module(f"{CHOSEN}.utilities.exceptions"), "_TunerExitException"
    ),
    "_combined_loader": said_in(f"{CHOSEN}.loops.fit_loop", "_combined_loader"),
    "_checkpoint_connector": said_in(f"{CHOSEN}.trainer.trainer", "_checkpoint_connector"),
    "_hpc_resume_path": said_in(f"{CHOSEN}.trainer.connectors.checkpoint_connector", "_hpc_resume_path"),
    "_loaded_checkpoint": said_in(f"{CHOSEN}.trainer.connectors.checkpoint_connector", "_loaded_checkpoint"),
    "_combined_loader_states_to_load": said_in(f"{CHOSEN}.loops.fit_loop", "_combined_loader_states_to_load"),
    "_load_combined_loader_states": takes(f"{CHOSEN}.loops", "_FitLoop._load_combined_loader_states", None),
    "_data_source": said_in(f"{CHOSEN}.loops.fit_loop", "_data_source"),
    "_mode": said_in(f"{CHOSEN}.utilities.combined_loader", "_mode"),
    "_val_check_time_interval": said_in(f"{CHOSEN}.loops.fit_loop", "_val_check_time_interval")
    if "_val_check_time_interval" in inspect.getsource(importlib.import_module(f"{CHOSEN}.loops.fit_loop"))
    else no_check,  # of newer releases
    "_active_loop": said_in(f"{CHOSEN}.trainer.trainer", "_active_loop"),
    "_data_fetcher": said_in(f"{CHOSEN}.loops.fit_loop", "_data_fetcher"),
    "_state_dicts": said_in(f"{CHOSEN}.utilities.combined_loader", "_state_dicts"),
    "_after_closure": takes(f"{CHOSEN}.plugins.precision", "Precision._after_closure", None, None, None),
    "_optimizer": said_in(f"{CHOSEN}.core.optimizer", "_optimizer"),
    **{
        name: said_in(f"{CHOSEN}.loops.training_epoch_loop", name)
        for name in (
            "_batches_that_stepped",
            "_num_ready_batches_reached",
            "_should_accumulate",
            "_should_check_val_fx",
            "_skip_next_val",
        )
    },
    "_results": said_in(f"{CHOSEN}.loops.fit_loop", "_results"),
    "_IndexBatchSamplerWrapper": has(
        lambda: importlib.import_module(f"{CHOSEN}.overrides.distributed"), "_IndexBatchSamplerWrapper"
    ),
}
# Of torch, torchmetrics and tensorboard, used elsewhere.
OF_OTHERS: dict[str, Callable[[], object]] = {
    "_iterator": said_in(LOADERS, "_iterator"),
    "_reset": said_in(LOADERS, "_reset"),
    "_cache": said_in("torchmetrics.metric", "_cache"),
    "_is_synced": said_in("torchmetrics.metric", "_is_synced"),
    "_defaults": said_in("torchmetrics.metric", "_defaults"),
    "_reductions": said_in("torchmetrics.metric", "_reductions"),
    "_get_file_writer": said_in("torch.utils.tensorboard.writer", "_get_file_writer"),
    "_file_name": said_in("tensorboard.summary.writer.event_file_writer", "_file_name"),
}
# Of Python's multiprocessing and concurrent.futures.
OF_MULTIPROCESSING: dict[str, Callable[[], object]] = {
    "_children": said_in("multiprocessing.process", "_children"),
    "_flag": lambda: multiprocessing.Event()._flag.release,  # type: ignore[attr-defined]
    "_popen": said_in("multiprocessing.process", "_popen"),
    "_reader": lambda: multiprocessing.Queue()._reader.fileno(),  # type: ignore[attr-defined]
    "_recv": takes("multiprocessing.connection", "Connection._recv", None, 1, None),
    "_WorkItem": has(lambda: importlib.import_module("concurrent.futures.thread"), "_WorkItem"),
    "_wlock": lambda: multiprocessing.Queue()._wlock.acquire(timeout=1),  # type: ignore[attr-defined]
}
ALL = OF_TORCH | OF_LIGHTNING | OF_OTHERS | OF_MULTIPROCESSING
# Python's own that are documented.
_OF_PYTHON = {"_exit", "_getframe", "_current_exceptions", "_current_frames", "_closed", "_fields", "_replace"}


def options_of_backends() -> Iterator[Callable[[], Any]]:
    yield dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    if HAS_NCCL:
        yield dist.ProcessGroupNCCL.Options


@pytest.mark.parametrize("name", ALL)
def test_a_private_name_exists_with_its_expected_signature(name: str) -> None:
    ALL[name]()


def test_nccl_names_exist_only_in_nccl_builds() -> None:
    assert hasattr(c10d, "_dump_nccl_trace_json") is hasattr(c10d, "_dump_nccl_trace") is HAS_NCCL
    assert HAS_NCCL or torch.version.cuda is None


def private(node: ast.AST) -> Iterator[str]:
    """The private names of others that a piece of code uses."""
    if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
        yield node.attr
    if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_ncclsafe"):
        yield from (name.name for name in node.names)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return
    if node.func.id in ("getattr", "hasattr"):
        yield from (part.value for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant))


def used_in(path: Path) -> set[str]:
    nodes = nodes_of(path.read_text())
    found = {name for node in nodes for name in private(node)}
    if path in (*OWN_OF_TORCH, HERE / "_lightning.py"):
        # Names in tables, too.
        found |= {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}
    names = {name for name in found if isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w+", name)}
    return names - _OF_PYTHON


def ours(paths: list[Path]) -> set[str]:
    """Private names that we define ourselves."""
    found: set[str] = set()
    for node in (node for path in paths for node in nodes_of(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def test_every_used_private_name_is_listed() -> None:
    listed = {*OF_TORCH, *OF_MULTIPROCESSING} - {"_dump_fr_trace", "_dump_nccl_trace"}
    assert set().union(*map(used_in, OWN_OF_TORCH)) - ours(OWN_OF_TORCH) - listed == set()
    others = [path for path in HERE.rglob("*.py") if path not in OWN_OF_TORCH]
    assert set().union(*map(used_in, others)) - ours([*others, *OWN_OF_TORCH]) - ALL.keys() == set()


def test_every_listed_private_name_is_used() -> None:
    said = {word for path in HERE.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    assert [name for name in ALL if name not in said] == ["_dump_fr_trace", "_dump_nccl_trace"]
