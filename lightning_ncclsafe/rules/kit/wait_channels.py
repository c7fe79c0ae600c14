"""What a process that sleeps in the kernel waits for, by the kernel function that it sleeps in."""

import re
from enum import Enum


class Wait(Enum):
    """What it waits for."""

    FREEZER = "its control group to be thawed"
    """``docker pause``, or a scheduler that suspends jobs."""
    NETWORK_STORAGE = "storage on a network"
    STORAGE = "storage"
    PIPE = "the other end of a pipe"
    DRIVER = "a device's driver"
    UNKNOWN = ""


# The first that fits decides. Names are those of Linux 4 to 6; file systems prefix theirs.
_CHANNELS = (
    (Wait.FREEZER, r"__refrigerator|do_freezer_trap|get_signal"),
    (Wait.DRIVER, r"_?nv(?!me)|uvm_|os_acquire|amdgpu|kfd_|rm_"),
    (
        Wait.NETWORK_STORAGE,
        r"nfs|__nfs|rpc_|ll_|cl_sync|cl_lock|ptlrpc|osc_|ldlm|ceph|cifs|smb|wait_for_response|gpfs|mmfs|cxi|fhgfs|beegfs"
        r"|p9_|v9fs|fuse|__fuse|request_wait_answer|afs_|orangefs",
    ),
    (
        Wait.STORAGE,
        r"io_schedule|folio_wait|folio_lock|__folio|wait_on_page|__lock_page|wait_on_bit|__wait_on_b|bit_wait_io|jbd2|ext4"
        r"|xfs|btrfs|f2fs|zfs|txg_|cv_wait|blk_|blkdev|submit_bio|bio_|balance_dirty|wb_wait|filemap|sync_|vfs_|do_fsync"
        r"|percpu_rwsem_wait|sb_start|rq_qos|wbt_|dm_|md_|raid|nvme|scsi|dio_|__blockdev|iomap|do_get_write|read_extent",
    ),
    (Wait.PIPE, r"pipe_|anon_pipe|wait_for_partner|fifo_open"),
)
_COMPILED = tuple((wait, re.compile(names)) for wait, names in _CHANNELS)


def wait_of(channel: str) -> Wait:
    """What a process waits for that sleeps in this function of the kernel.

    Args:
        channel: Name of the function (``/proc/PID/wchan``); empty where unknown.
    """
    return next((wait for wait, names in _COMPILED if names.match(channel)), Wait.UNKNOWN) if channel else Wait.UNKNOWN
