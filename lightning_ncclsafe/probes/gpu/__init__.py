"""The GPU of this rank, by NVML and the kernel's log: no CUDA context is needed, and none is made."""
