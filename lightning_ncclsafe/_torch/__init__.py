"""The only package that calls private functions of torch, and handles differences between its versions.

``process_groups``, ``stores`` and ``recorders`` are for ``torch.distributed``, ``loading`` for loaders,
``sent_together``, ``tensors`` and ``sharded`` for models, and ``build`` for the installation.
"""
