"""What ranks have found on their hosts that will slow, starve or end the run: one cause per file."""

from lightning_ncclsafe.rules.kit.rule import Rule
from lightning_ncclsafe.rules.preflight.clocks_apart import clocks_apart
from lightning_ncclsafe.rules.preflight.cores_mismatch import cores_mismatch
from lightning_ncclsafe.rules.preflight.different_settings import different_settings
from lightning_ncclsafe.rules.preflight.different_versions import different_versions
from lightning_ncclsafe.rules.preflight.full_directory import full_directory
from lightning_ncclsafe.rules.preflight.gpu_memory_short import gpu_memory_short
from lightning_ncclsafe.rules.preflight.gpu_shared import gpu_shared
from lightning_ncclsafe.rules.preflight.gpu_unhealthy import gpu_unhealthy
from lightning_ncclsafe.rules.preflight.harmful_settings import harmful_settings
from lightning_ncclsafe.rules.preflight.host_under_pressure import host_under_pressure
from lightning_ncclsafe.rules.preflight.ignored_settings import ignored_settings
from lightning_ncclsafe.rules.preflight.memory_short import memory_short
from lightning_ncclsafe.rules.preflight.shm_too_small import shm_too_small
from lightning_ncclsafe.rules.preflight.silent_at_preflight import silent_at_preflight
from lightning_ncclsafe.rules.preflight.slow_directory import slow_directory
from lightning_ncclsafe.rules.preflight.socket_fallback import socket_fallback
from lightning_ncclsafe.rules.preflight.swap_in_use import swap_in_use
from lightning_ncclsafe.rules.preflight.swap_on_network import swap_on_network
from lightning_ncclsafe.rules.preflight.too_few_open_files import too_few_open_files
from lightning_ncclsafe.rules.preflight.too_many_workers import too_many_workers
from lightning_ncclsafe.rules.preflight.unreachable_interface import unreachable_interface
from lightning_ncclsafe.rules.preflight.unusable_directory import unusable_directory

# Of what ranks have found on their hosts, the most harmful first: what ends the run, what lets it hang, what slows it.
PREFLIGHT_RULES: tuple[Rule, ...] = (
    unusable_directory,
    gpu_memory_short,
    shm_too_small,
    memory_short,
    different_versions,
    too_many_workers,
    silent_at_preflight,
    unreachable_interface,
    swap_on_network,
    swap_in_use,
    gpu_unhealthy,
    gpu_shared,
    different_settings,
    socket_fallback,
    cores_mismatch,
    full_directory,
    too_few_open_files,
    host_under_pressure,
    harmful_settings,
    ignored_settings,
    slow_directory,
    clocks_apart,
)
