"""What DDP and FSDP send together: buckets, and units of modules."""

from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lightning_ncclsafe._torch.build import c10d


class SentTogether(NamedTuple):
    """Parameters that torch sends in one collective.

    Attributes:
        parameters: Their names below the module in question.
        elements: Elements on all ranks together, with padding.
        shard_elements: Elements on one rank, with padding; 0 if every rank has all.
        size_bytes: Bytes of ``elements``.
        groups: Names of the process groups of these collectives.
    """

    parameters: tuple[str, ...]
    elements: int
    shard_elements: int
    size_bytes: int
    groups: tuple[str, ...]


def ddp_buckets(module: Any) -> list[list[SentTogether]]:
    """The buckets of a ``DistributedDataParallel``, in the order in which they are reduced; empty for other modules.

    Two lists if DDP rebuilds them after the first step, in the order of the gradients, which is taken to be the reverse
    of the parameters'. Asking DDP (``_get_ddp_logging_data``) would wait for the lock that its reducer holds while it
    waits for a bucket (seen with torch 2.13).
    """
    if not isinstance(module, DistributedDataParallel):
        return []
    first, later = c10d._DEFAULT_FIRST_BUCKET_BYTES, int(module.bucket_bytes_cap)
    # Not in older releases, where the default is indistinguishable from the same size set by the user.
    config: Any = getattr(module, "_bucket_config", None)
    caps = [min(getattr(config, "first_bucket_bytes_cap", first), later), later]
    caps = [*getattr(config, "per_bucket_bytes_caps", ())] or caps
    parameters: list[Any] = list(module._module_parameters)
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    if module.find_unused_parameters and not module.static_graph:
        return [_buckets(module, names, parameters, caps)[::-1]]
    backwards = parameters[::-1]
    unlimited = [sum(map(_bytes_of, parameters)) + 1]
    return [_buckets(module, names, backwards, limits) for limits in (caps, unlimited)]


def sends_buffers(module: Any) -> bool:
    """Whether each forward pass, even in an evaluation, begins with a broadcast of the module's buffers."""
    ddp: Any = module
    return isinstance(module, DistributedDataParallel) and bool(ddp.will_sync_module_buffers())


def _buckets(module: Any, names: dict[int, str], parameters: list[Any], caps: list[int]) -> list[SentTogether]:
    indices, _ = c10d._compute_bucket_assignment_by_size(parameters, caps)
    buckets = [[parameters[index] for index in bucket] for bucket in indices]
    return [
        SentTogether(
            parameters=tuple(names.get(id(parameter), "?") for parameter in bucket),
            elements=sum(parameter.numel() for parameter in bucket),
            shard_elements=0,
            size_bytes=sum(map(_bytes_of, bucket)),
            groups=_group_names(module.process_group),
        )
        for bucket in buckets
    ]


def _bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _group_names(*groups: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group.group_name for group in groups if group is not None))


def fsdp_units(module: Any) -> list[SentTogether]:
    """What FSDP or FSDP2 sends for this module itself, without its submodules; empty if it is not wrapped."""
    handle = getattr(module, "_handle", None)
    if handle is not None and hasattr(handle, "flat_param"):
        return [_flat_unit(module, handle)]
    return [_sharded_unit(module, group) for group in param_groups(module)]


def param_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of this module itself."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    # A list from torch 2.12 on.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _flat_unit(module: Any, handle: Any) -> SentTogether:
    flat = handle.flat_param
    # The parameter itself is sometimes one rank's share and sometimes all of it.
    shard = flat._sharded_size.numel()
    elements = shard * handle.process_group.size() if handle.uses_sharded_strategy else 0
    elements = elements or flat._unpadded_unsharded_size.numel()
    return SentTogether(
        parameters=tuple(flat._fqns),
        elements=elements,
        shard_elements=shard if handle.uses_sharded_strategy else 0,
        size_bytes=elements * flat.element_size(),
        groups=_group_names(handle.process_group, getattr(module, "_inter_node_pg", None)),
    )


def _sharded_unit(module: Any, group: Any) -> SentTogether:
    owners = {id(inner): f"{name}." if name else "" for name, inner in module.named_modules()}
    sent = [(parameter, parameter.padded_sharded_param_size.numel()) for parameter in group.fsdp_params]
    infos = [parameter._module_info for parameter, _ in sent]
    mesh = group.mesh_info
    ranks = mesh.shard_process_group.size()
    wanted = ("_all_gather_process_group", "_reduce_scatter_process_group", "_all_reduce_process_group")
    names = [name for name in wanted if name != "_all_reduce_process_group" or group._is_hsdp]
    return SentTogether(
        parameters=tuple(f"{owners.get(id(info.module), '')}{info.param_name}" for info in infos),
        elements=sum(count for _, count in sent) * ranks,
        shard_elements=sum(count for _, count in sent),
        size_bytes=sum(count * parameter.sharded_param.element_size() for parameter, count in sent) * ranks,
        groups=_group_names(mesh.shard_process_group, *(getattr(group, name, None) for name in names)),
    )
