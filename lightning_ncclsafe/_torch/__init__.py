"""The only room that calls private functions of torch, and handles differences between its versions.

Each module is a door: ``own_groups``, ``stores`` and ``recorders`` of ``torch.distributed``, ``loading`` of its
loaders, ``sent_together``, ``tensors`` and ``sharded`` of models, and ``build`` of the installation.
"""
