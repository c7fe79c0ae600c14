"""Tests of Lightning that pass with its own classes only, and why that is right: by file and name."""

KNOWN: dict[str, str] = {
    "strategies/test_fsdp.py::test_device_mesh_type_annotation": (
        "asks inspect.signature for device_mesh, which ours take as one of **kwargs; jsonargparse finds it there"
    ),
    "strategies/test_model_parallel.py::test_torch_greater_equal_2_4": (
        "expects an error of Lightning's that begins with the name of the class, which is SafeModelParallel here"
    ),
    "strategies/test_model_parallel.py::test_save_checkpoint_storage_options": (
        "expects an error of Lightning's that begins with the name of the class, which is SafeModelParallel here"
    ),
}
