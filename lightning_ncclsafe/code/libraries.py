"""Files and functions of torch, Lightning and other libraries that rules know by name, in one table.

Code of this package declares what it is by marks, see :mod:`lightning_ncclsafe.code.marks`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol


class _Frame(Protocol):
    """A frame of any stack."""

    @property
    def file(self) -> str:
        """Path of the source file as Python names it."""

    @property
    def function(self) -> str:
        """Name of the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package whose code is known.

    Attributes:
        names: Its import names, as parts of Lightning have two; empty for the standard library.
        folder: A regular expression for the folder of its files.
    """

    names: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """Functions in a file of a package, or in several; in names, a star matches any text, including slashes.

    Attributes:
        package: The package.
        file: Path within it.
        functions: Names of functions; empty for all of the file.
        but: Names to exclude.
        versions: The versions of the package that have it, as in a requirement; empty for all supported ones.
    """

    package: Package
    file: str
    functions: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    versions: str = ""

    def has(self, path: str, function: str) -> bool:
        """Whether a function is there; ``path`` is the path of its file, with slashes."""
        if re.search(f"{self.package.folder}{glob(self.file)}$", path) is None or _is_one(function, self.but):
            return False
        return not self.functions or _is_one(function, self.functions)


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """Code with one purpose, in any number of places."""

    places: tuple[CodePlace, ...]

    def has(self, file: str, function: str) -> bool:
        """Whether a frame is in it, by file and function as Python names them."""
        return _has(self, file, function)

    def has_any(self, stack: Iterable[_Frame]) -> bool:
        """Whether any of these frames is in it."""
        return any(_has(self, frame.file, frame.function) for frame in stack)

    def __or__(self, other: "Code") -> "Code":
        return Code((*self.places, *other.places))


def glob(text: str) -> str:
    """The regular expression for a text with stars."""
    return re.escape(text).replace(r"\*", ".*")


def _is_one(name: str, globs: tuple[str, ...]) -> bool:
    return any(re.fullmatch(glob(one), name) for one in globs)


@lru_cache(maxsize=16_384)
def _has(code: Code, file: str, function: str) -> bool:
    path = "/" + file.replace("\\", "/")
    return any(place.has(path, function) for place in code.places)


def is_top_level(function: str) -> bool:
    """Whether a frame of this name runs a file itself, as a program or as it is imported, and none of its functions."""
    return function == "<module>"


def _package(*names: str, before: str = "/") -> Package:
    return Package(names=names, folder=f"{before}(?:{'|'.join(names)})/".replace(".", "/"))


def _in(package: Package, *files: str, functions: str = "", but: str = "", versions: str = "") -> Code:
    named, others = tuple(functions.split()), tuple(but.split())
    return Code(
        tuple(CodePlace(package=package, file=file, functions=named, but=others, versions=versions) for file in files)
    )


_PYTHON = Package(names=(), folder="/")
_TORCH = _package("torch")
_PYTORCH = _package("lightning.pytorch", "pytorch_lightning")
_FABRIC = _package("lightning.fabric", "lightning_fabric")
_TENSORBOARDX = _package("tensorboardX")
_TRITON = _package("triton")
# Users have folders of these names.
_WANDB = _package("wandb", before="-packages/")
_MLFLOW = _package("mlflow", before="-packages/")

_C10D = "distributed/distributed_c10d.py"

# A storage is copied with the GIL held, which torch.save does with each tensor on a device; such a copy waits for all
# that is queued on the device, collectives included.
STORAGE_COPIES = _in(_TORCH, "storage.py", functions="cpu")
THREAD_START = _in(_PYTHON, "threading.py", functions="_bootstrap")
# torch.distributed
DISTRIBUTED = _in(_TORCH, "distributed/*")
# Where a rank that has joined early shadows the collectives of the others' models.
JOIN = _in(_TORCH, "distributed/algorithms/join.py", functions="__exit__")
C10D = _in(_TORCH, _C10D)
# What a call of the user's passes through: distributed_c10d.py, and the wrapper that logs its exceptions.
CALLS_OF_C10D = _in(_TORCH, _C10D, "distributed/c10d_logger.py")
SEND_OR_RECV = _in(_TORCH, _C10D, functions="send recv")
# What calls the forward of a part of the model.
MODULE_CALLS = _in(_TORCH, "nn/modules/module.py", functions="_wrapped_call_impl _call_impl")
# One rank gives to all, or all give to one.
ROOTED = _in(_TORCH, _C10D, functions="broadcast scatter gather reduce")
# Collectives to which each rank may give a different number of elements.
UNEVEN = _in(_TORCH, _C10D, functions="all_to_all all_to_all_single")
OBJECT_PICKLING = _in(_TORCH, _C10D, functions="_object_to_tensor _tensor_to_object")
GROUP_CREATION = _in(
    _TORCH,
    _C10D,
    functions="init_process_group monitored_barrier _store_based_barrier new_*group* _new_*group* split_group",
)
NAME_LOOKUPS = _in(_TORCH, "distributed/rendezvous.py") | _in(
    _PYTHON, "socket.py", functions="getaddrinfo getfqdn create_connection"
)
INIT_PROCESS_GROUP = _in(_TORCH, _C10D, functions="init_process_group")
RENDEZVOUS = _in(_TORCH, "distributed/rendezvous.py", "distributed/elastic/*")
COLLECTIVES = C10D | _in(_TORCH, "distributed/_functional_collectives.py", "distributed/utils.py")
SAVING_SHARDED = _in(_TORCH, "distributed/checkpoint/*", but="*load*")
BACKWARD = _in(_TORCH, "autograd/graph.py", functions="_engine_run_backward")
DDP = _in(_TORCH, "nn/parallel/distributed.py")
DDP_BUFFERS = _in(_TORCH, "nn/parallel/distributed.py", functions="_sync_buffers")
DDP_PARAMETERS_CHECK = _in(_TORCH, "distributed/utils.py", functions="_verify_param_shape_across_processes")
DDP_FIRST_BROADCAST = _in(_TORCH, "distributed/utils.py", functions="_sync_module_states")
FSDP = _in(_TORCH, "distributed/fsdp/*")
FSDP_STATE = _in(_TORCH, "distributed/fsdp/_state_dict_utils.py")
FSDP_OPTIMIZER_STATE = _in(_TORCH, "distributed/fsdp/_optim_utils.py")
FSDP_FORWARD = _in(_TORCH, "distributed/fsdp/*", functions="pre_forward _pre_forward _root_pre_forward forward")
FSDP_BACKWARD = _in(
    _TORCH,
    "distributed/fsdp/*",
    functions="pre_backward _pre_backward _pre_backward_hook post_backward _post_backward_hook"
    " _post_backward_final_callback",
)
DTENSOR = _in(_TORCH, "distributed/tensor/*")
SHARDING = FSDP | DTENSOR | _in(_TORCH, "distributed/_composable/*", "distributed/algorithms/*", "distributed/nn/*")
GATHERED_STATE = _in(_TORCH, "distributed/_state_dict_utils.py")
SHARDED_CHECKPOINT = _in(_TORCH, "distributed/checkpoint/*")
STATE_GATHERING = SHARDED_CHECKPOINT | GATHERED_STATE | FSDP_STATE | FSDP_OPTIMIZER_STATE
GRADIENT_NORM = _in(
    _TORCH,
    "nn/utils/clip_grad.py",
    "distributed/fsdp/fully_sharded_data_parallel.py",
    functions="clip_grad_norm_",
)
SYNC_BATCH_NORM = _in(_TORCH, "nn/modules/_functions.py")

# The rest of torch
SAVE = _in(_TORCH, "serialization.py", functions="save _save _legacy_save")
DATALOADER = _in(_TORCH, "utils/data/dataloader.py")
FETCH = _in(_TORCH, "utils/data/_utils/fetch.py")
LOADING = _in(_TORCH, "utils/data/*")
ALL_OF_TORCH = _in(_TORCH, "*")
# What torch.multiprocessing runs first in a process that it starts.
SPAWNED_PROCESS = _in(_TORCH, "multiprocessing/spawn.py", functions="_wrap")
# What torch.compile and Triton run while they compile or tune; without what is also on the stack while compiled code
# runs (eval_frame.py, output_code.py, Triton's launcher).
COMPILATION = (
    _in(
        _TORCH,
        "_dynamo/convert_frame.py",
        "_dynamo/symbolic_convert.py",
        "_dynamo/output_graph.py",
        "_inductor/compile_fx.py",
        "_inductor/graph.py",
        "_inductor/lowering.py",
        "_inductor/scheduler.py",
        "_inductor/async_compile.py",
        "_inductor/codecache.py",
        "_inductor/cpp_builder.py",
        "_inductor/select_algorithm.py",
        "_inductor/autotune_process.py",
        "_inductor/codegen/*",
        "_inductor/fx_passes/*",
        "_inductor/kernel/*",
        "_inductor/compile_worker/*",
        "utils/cpp_extension.py",
    )
    | _in(_TORCH, "_functorch/_aot_autograd/graph_compile.py", versions=">=2.9")
    | _in(_TORCH, "_functorch/_aot_autograd/jit_compile_runtime_wrappers.py", versions="<2.9")
    | _in(_TRITON, "compiler/*", "backends/*", "runtime/build.py")
    | _in(_package("numba"), "core/dispatcher.py", "core/compiler*")
)
TUNING = (
    _in(_TORCH, "_inductor/runtime/*", functions="precompile* _precompile* benchmark* autotune* coordinate_descent*")
    | _in(_TRITON, "runtime/autotuner.py", functions="autotune* benchmark* do_bench* _bench* warmup*")
    | _in(_TRITON, "runtime/jit.py", functions="warmup*")
    | _in(_TRITON, "runtime/jit.py", functions="_do_compile", versions=">=3.5")
)

# Lightning
TRAINER_RUN = _in(_PYTORCH, "trainer/trainer.py", functions="_run")
END_OF_EPOCH = _in(_PYTORCH, "loops/fit_loop.py", functions="on_advance_end on_run_end")
# The Trainer's public functions, and what they call; the stars are for releases before 2.0, which had folders here.
TRAINER = _in(_PYTORCH, "trainer/trainer.py")
# Hooks that follow an exception.
AFTER_EXCEPTION = _in(_PYTORCH, "trainer/call.py", functions="_interrupt")
# The calls into each public function, through which exceptions leave the Trainer.
TRAINER_CALL = _in(_PYTORCH, "trainer/*.py", functions="_call_and_handle_interrupt")
FITTING = _in(_PYTORCH, "trainer/trainer.py", functions="_fit_impl")
TESTING = _in(_PYTORCH, "trainer/trainer.py", functions="_test_impl")
SANITY_CHECK = _in(_PYTORCH, "trainer/trainer.py", functions="_run_sanity_check")
SAVE_CHECKPOINT = _in(_PYTORCH, "trainer/trainer.py", functions="save_checkpoint")
TRAINING_LOOPS = _in(_PYTORCH, "loops/*fit_loop.py", "loops/*training_epoch_loop.py")
FIT_LOOP_RUN = _in(_PYTORCH, "loops/fit_loop.py", functions="run on_run_start")
BATCH = _in(_PYTORCH, "loops/optimization/*") | _in(_PYTORCH, "loops/evaluation_loop.py", functions="_evaluation_step")
SETUP_OF_LOADERS = _in(_PYTORCH, "loops/fit_loop.py", "loops/evaluation_loop.py", functions="setup_data")
EVALUATION_LOOPS = _in(_PYTORCH, "loops/*evaluation_loop.py")
PREDICTION_LOOPS = _in(_PYTORCH, "loops/*prediction_loop.py")
TEARDOWN = _in(_PYTORCH, "trainer/call.py", functions="_call_teardown_hook")
HOOKS_OF_MODULES = _in(_PYTORCH, "trainer/*.py", functions="_call_lightning_module_hook")
HOOKS_OF_DATA = _in(_PYTORCH, "trainer/*.py", functions="_call_lightning_datamodule_hook")
HOOKS_OF_CALLBACKS = _in(_PYTORCH, "trainer/*.py", functions="_call_callback_hooks")
HOOKS_OF_STRATEGIES = _in(_PYTORCH, "trainer/*.py", functions="_call_strategy_hook")
STRATEGY_BARRIER = _in(_PYTORCH, "strategies/*.py", functions="barrier")
ALL_OF_LIGHTNING = _in(_PYTORCH, "*") | _in(_FABRIC, "*")
# What may be around any call, and does not show which one it is.
HELPERS = ALL_OF_LIGHTNING | _in(_TORCH, "utils/_contextlib.py")
TRAINER_STAGE = _in(_PYTORCH, "trainer/trainer.py", functions="_run_stage")
INFINITE_BARRIER = _in(_FABRIC, "utilities/distributed.py", functions="__exit__ __call__")
SIGTERM_BROADCAST = _in(
    _PYTORCH, "loops/training_epoch_loop.py", functions="_broadcast_sigterm_tensor", versions=">=2.5.2"
)
LENGTH_CHECK = _in(_PYTORCH, "utilities/data.py", functions="has_len_all_ranks")
TENSOR_GATHER = _in(_FABRIC, "utilities/distributed.py", functions="_gather_all_tensors")
EARLY_STOPPING = _in(_PYTORCH, "callbacks/early_stopping.py")
# The barrier after a checkpoint has been loaded; ranks without one wait there at once.
RESUMED = _in(_PYTORCH, "trainer/connectors/checkpoint_connector.py", functions="resume_end")
PUTTING_CHECKPOINT_TOGETHER = _in(_PYTORCH, "trainer/connectors/checkpoint_connector.py", functions="dump_checkpoint")
MODEL_CHECKPOINT = _in(_PYTORCH, "callbacks/model_checkpoint.py")
LOGGED_VALUES = _in(_PYTORCH, "trainer/connectors/logger_connector/result.py")
LOGGED_VALUES_READ = _in(
    _PYTORCH, "trainer/trainer.py", functions="callback_metrics logged_metrics progress_bar_metrics"
)
LOGGING = (
    _in(_PYTORCH, "trainer/connectors/logger_connector/logger_connector.py", functions="log_metrics")
    | _in(_PYTORCH, "loggers/*")
    | _in(_FABRIC, "loggers/*")
)
FETCHERS = _in(_PYTORCH, "loops/fetchers.py", functions="__next__ __iter__")
SAVING = (
    _in(_PYTORCH, "plugins/io/*", but="*load*")
    | _in(_FABRIC, "plugins/io/*", but="*load*")
    | _in(_FABRIC, "utilities/cloud_io.py", functions="_atomic_save")
    | _in(_PYTORCH, "callbacks/model_checkpoint.py", functions="on_* _save* _remove* _link*")
    | _in(_PYTORCH, "trainer/trainer.py", functions="save_checkpoint")
    | PUTTING_CHECKPOINT_TOGETHER
)
# What runs before a save: whether to save, and under which name.
BEFORE_SAVING = _in(
    _PYTORCH, "callbacks/model_checkpoint.py", functions="on_* _save_topk* _save_monitor* _save_none* _save_last*"
)
# Called on a logger within a save that has ended by then; the user's own logger may be in any file.
HOOKS_OF_LOGGERS = _in(Package(names=_PYTORCH.names, folder="/"), "*", functions="after_save_checkpoint")
# Of the user's model, and of its parts.
FORWARD = _in(Package(names=_PYTORCH.names, folder="/"), "*", functions="forward")
# Called on each logger where a call of the Trainer ends, whether it has failed or not.
FINALIZE = _in(Package(names=_PYTORCH.names, folder="/"), "*", functions="finalize")
END_OF_CALL = TEARDOWN | AFTER_EXCEPTION
PROFILE = _in(_PYTORCH, "profilers/profiler.py", functions="profile")
START_OF_NO_PROFILER = _in(_PYTORCH, "profilers/base.py", functions="start")
RANK_ZERO_ONLY = _in(_package("lightning_utilities"), "core/rank_zero.py", functions="wrapped_fn")

# Loggers
SUMMARY_WRITER = _in(_TORCH, "utils/tensorboard/writer.py") | _in(_TENSORBOARDX, "writer.py")
WANDB_RUN = _in(_WANDB, "sdk/wandb_run.py")
WANDB_AGENT = _in(_WANDB, "agents/*")
MLFLOW_CLIENT = _in(_MLFLOW, "tracking/client.py")
LOG_WRITERS = (
    _in(_TORCH, "utils/tensorboard/*")
    | _in(_package("tensorboard"), "*")
    | _in(_TENSORBOARDX, "*")
    | _in(_WANDB, "*")
    | _in(_MLFLOW, "*")
    | _in(_package("comet_ml", before="-packages/"), "*")
    | _in(_package("neptune", before="-packages/"), "*")
)
# Python's own: what handles a record, and what makes its text of objects of the user's.
PYTHON_LOGGING = _in(_PYTHON, "logging/__init__.py", functions="callHandlers")
TEXT_OF_RECORDS = _in(_PYTHON, "logging/__init__.py", functions="getMessage")

# Others
METRIC_GATHER = _in(_package("torchmetrics"), "utilities/distributed.py", functions="gather_all_tensors")
# What multiprocessing runs first in a process that it has started.
CHILD_PROCESS = _in(_PYTHON, "multiprocessing/process.py", functions="_bootstrap")
PROCESSES = _in(_PYTHON, "multiprocessing/*", "concurrent/*", "subprocess.py", "selectors.py")
SUBPROCESS = _in(_PYTHON, "subprocess.py")
WAITS_FOR_PROCESSES = _in(
    _PYTHON,
    "multiprocessing/queues.py",
    "multiprocessing/connection.py",
    "multiprocessing/pool.py",
    "multiprocessing/popen_fork.py",
    "multiprocessing/synchronize.py",
    "multiprocessing/managers.py",
    "queue.py",
    "concurrent/futures/*",
)
POOL_RESULT = _in(_PYTHON, "multiprocessing/pool.py", functions="get")
POOL_PROCESS = _in(_PYTHON, "multiprocessing/pool.py", functions="worker")
LOADER_PROCESS = _in(_TORCH, "utils/data/_utils/worker.py", functions="_worker_loop")
# Called by both: waits for a task.
POOL_TASK = _in(_PYTHON, "multiprocessing/queues.py", functions="get")
# Takes a lock that processes share; those of threads have no Python frame.
TAKES_SHARED_LOCK = _in(_PYTHON, "multiprocessing/synchronize.py", functions="__enter__")
WAITS_FOR_OTHERS = WAITS_FOR_PROCESSES | _in(_PYTHON, "threading.py")
WAITS_FOR_THREADS = _in(_PYTHON, "queue.py") | _in(_PYTHON, "threading.py", functions="wait wait_for join acquire")
_FILELOCK = _package("filelock")
# Files that are locks by their existence.
EXISTING_LOCK_FILES = (
    _in(_TORCH, "utils/file_baton.py", functions="wait")
    | _in(_FILELOCK, "_soft.py", functions="_acquire", versions="<4.3")
    | _in(_FILELOCK, "_soft/*", functions="_acquire", versions=">=4.3")
)
# What waits for a lock on a file, some of it by trying again and again; the object has the file's path.
FILE_LOCKS = (
    EXISTING_LOCK_FILES
    | _in(_FILELOCK, "_api.py", functions="acquire", versions="<4.3")
    | _in(_FILELOCK, "_core/_lock.py", functions="acquire", versions=">=4.3")
    | _in(_package("portalocker"), "utils.py", functions="acquire")
    | _in(_package("fasteners"), "process_lock.py", functions="acquire")
)
PATHS_OF_FILE_LOCKS = ("lock_file_path", "lock_file", "filename", "path")
# Runs the program of `python -m`; from Python 3.11 on it is frozen, "<frozen runpy>".
RUN_MODULE = _in(_PYTHON, "*runpy*")
REQUESTS = (
    _in(_PYTHON, "socket.py", "ssl.py", "http/client.py", "urllib/request.py", "xmlrpc/client.py")
    | _in(_package("requests", before="-packages/"), "*")
    | _in(_package("urllib3", before="-packages/"), "*")
    | _in(_package("httpx", before="-packages/"), "*")
)
# Runs on threads of its own, for which no other thread waits.
HOUSEKEEPING = (
    _in(_PYTORCH, "callbacks/progress/rich_progress.py", functions="run", versions=">=2.6.1")
    | _in(_FABRIC, "strategies/launchers/subprocess_script.py", functions="run")
    | _in(_package("tqdm"), "_monitor.py", functions="run")
)
# Enters a generator that is a context manager.
CONTEXTS = _in(_PYTHON, "contextlib.py", functions="__enter__")
# Passes what it is given to native code.
CTYPES = _in(_PYTHON, "ctypes/*")
HANDING_OVER = _in(_TORCH, "multiprocessing/reductions.py") | _in(_PYTHON, "multiprocessing/resource_sharer.py")
DEBUGGERS = (
    _in(_PYTHON, "pdb.py", "bdb.py")
    | _in(_package("IPython"), "core/debugger.py")
    # Interactive shells that are called from within a program.
    | _in(_PYTHON, "code.py", functions="interact raw_input")
    | _in(_package("IPython"), "terminal/embed.py", "terminal/interactiveshell.py")
    | _in(_package("pudb"), "*")
    | _in(_package("debugpy"), "*")
    # Remote debuggers wait for a connection before they are in pdb.
    | _in(Package(names=("remote_pdb",), folder="-packages/"), "remote_pdb.py")
    | _in(_package("rpdb", "web_pdb", "madbg", before="-packages/"), "*")
    # PyCharm's debugger, which is not an installed package.
    | _in(Package(names=("pydevd",), folder="/"), "pydevd*")
)

SKIPPING_REFUSED = "Skipping the `training_step`"
"""How Lightning's error begins where a step of a distributed training returns None."""
