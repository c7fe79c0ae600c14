"""One rank's part of a sharded model, and its distributed checkpoints, without collectives."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch

from lightning_ncclsafe._torch.sent_together import param_groups
from lightning_ncclsafe._torch.tensors import saved_buffers


class FlatPart(NamedTuple):
    """This rank's part of a parameter that FSDP has flattened together with others and cut into equal pieces.

    Attributes:
        name: Name in the model without FSDP.
        parameter: The parameter that optimizers have.
        shape: Shape of the whole parameter.
        begin: Index of the first value of this part in the whole.
        numel: Number of values of this part.
        values: Returns their current values.
    """

    name: str
    parameter: Any
    shape: tuple[int, ...]
    begin: int
    numel: int
    values: Callable[[], torch.Tensor]


class UnknownSplitError(Exception):
    """A model is sharded in a way that cannot be read on one rank alone; the message says how."""


def flat_parts(model: torch.nn.Module) -> Iterator[FlatPart]:
    """The parameters of FSDP; empty if the model is not wrapped by FSDP.

    Raises:
        UnknownSplitError: If FSDP has options with which Lightning loads no sharded checkpoint, or optimizers do not
            have the parameters.
    """
    for prefix, module in model.named_modules():
        handle: Any = getattr(module, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param"):
            continue
        flat = handle.flat_param
        if not handle.uses_sharded_strategy:
            raise UnknownSplitError("FSDP with NO_SHARD has no sharded checkpoints")
        if flat._params is None:
            raise UnknownSplitError("FSDP with use_orig_params=False lets optimizers see only flat parameters")
        if flat._shared_param_infos:
            raise UnknownSplitError("FSDP stores parameters that modules share in its own format")
        before = f"{prefix}." if prefix else ""
        infos: Any = zip(flat._fqns, flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        for name, parameter, shape, info in infos:
            begin, numel = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            yield FlatPart(
                name=_saved_name(f"{before}{name}"),
                parameter=parameter,
                shape=tuple(shape),
                begin=info.intra_param_start_idx if info.in_shard else 0,
                numel=numel,
                values=partial(_flat_values, flat, begin, numel),
            )


def _flat_values(flat: Any, begin: int, numel: int) -> torch.Tensor:
    # The parameter itself is sometimes one rank's share and sometimes all of it; only the share before the first batch.
    values: torch.Tensor = getattr(flat, "_local_shard", flat)
    return values.detach()[begin : begin + numel]


def _saved_name(name: str) -> str:
    """The name in a checkpoint, without the wrappers of sharding, recomputation and compilation."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def split_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """All parameters by their names in a checkpoint; for FSDP2, the ones that optimizers have.

    In the middle of a batch the module itself has whole parameters instead.
    """
    split: dict[tuple[int, str], Any] = {}
    for module in model.modules():
        for parameter in (one for group in param_groups(module) for one in group.fsdp_params):
            info = parameter._module_info
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            split |= {(id(owner), name): parameter.sharded_param for owner, name in owners}
    return {
        _saved_name(f"{prefix}.{name}".removeprefix(".")): split.get((id(module), name), parameter)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def plain_buffers(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As :func:`saved_buffers`, by their names in a checkpoint."""
    for name, owner, key in saved_buffers(model):
        yield _saved_name(name), owner, key


def saved_names(model: torch.nn.Module, *, is_flat: bool) -> set[str]:
    """The names in the model's own state dict, without a collective.

    Args:
        is_flat: Whether it is wrapped by FSDP, which gathers whole parameters for a state dict: then the names of all
            that is registered, and of what modules with their own state dict add.
    """
    if not is_flat:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return {*get_model_state_dict(model)}
    found = {part.name for part in flat_parts(model)} | {name for name, _, _ in plain_buffers(model)}
    for prefix, module in model.named_modules():
        kind, before = type(module), _saved_name(f"{prefix}.")
        if kind.get_extra_state is not torch.nn.Module.get_extra_state:
            found.add(f"{before}_extra_state".removeprefix("."))
        elif kind.state_dict is not torch.nn.Module.state_dict and not [*flat_parts(module)]:
            found |= {f"{before}{name}".removeprefix(".") for name in module.state_dict()}
    managed = {id(part.parameter) for part in flat_parts(model)}
    # Parameters that FSDP ignores are saved unchanged.
    found |= {_saved_name(name) for name, parameter in model.named_parameters() if id(parameter) not in managed}
    return found


def split_of(value: Any) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]], Any] | None:
    """A DTensor's shape, the offset of this rank's part, and the part; None for anything else.

    Raises:
        UnknownSplitError: If ranks have partial sums.
    """
    if not hasattr(value, "_local_tensor"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise UnknownSplitError("a tensor of the model is a partial sum that has not been reduced")
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(value.shape), [(tuple(offsets), tuple(sizes))], value._local_tensor


def import_checkpointing() -> None:
    """Imports in advance what a save at the end needs: then, imports may wait for the main thread."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.tensor._utils  # noqa: F401


def flattened(state: Any) -> Iterator[tuple[list[str | int], Any]]:
    """The entries of a nested state, each with its path, as torch.distributed.checkpoint flattens it."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    values, paths = flatten_state_dict(state)
    for name, value in values.items():
        yield [*paths[name]], value


def save_part(value: Any, file: BinaryIO) -> None:
    """Writes a value for ``torch.load``; of a view only its own elements, not all that it is a view of."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()
    torch.save(value, file)


class StoredChunk(NamedTuple):
    """A part of a tensor, or another value, in a file of a distributed checkpoint."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class StoredEntry(NamedTuple):
    """One entry of a distributed checkpoint; without a type, a value that is no tensor."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: list[StoredChunk]


def distributed_metadata(entries: Iterable[StoredEntry]) -> bytes:
    """The content of ``.metadata``, the index of a distributed checkpoint."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    stored: dict[Any, Any] = {}
    for entry in entries:
        name = ".".join(map(str, entry.path))
        paths[name] = entry.path
        if entry.dtype:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is of {entry.dtype!r}, which is not a tensor type")
            described[name] = metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
        else:
            described[name] = metadata.BytesStorageMetadata()
        for number, chunk in enumerate(entry.chunks):
            index = (
                metadata.MetadataIndex(name, torch.Size(chunk.offsets), number)
                if entry.dtype
                else metadata.MetadataIndex(name)
            )
            stored[index] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    found = metadata.Metadata(
        state_dict_metadata=described, planner_data=paths, storage_data=stored, storage_meta=metadata.StorageMeta()
    )
    found.version = "1.0.0"
    return pickle.dumps(found)
