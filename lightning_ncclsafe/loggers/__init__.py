"""Loggers off the training thread: what they are given is staged on a local disk, then delivered in its own time.

The doors are ``starting``, which takes a logger off the thread, ``offload``, one that is off it and all of them, and
``recovery``, what a process that is gone has left. In the order of the data: a backend (``tensorboard_backend``,
``csv_backend``, ``calls_backend``) puts what it captures into the ``intake``, the ``stager`` into the ``store``, and
``delivery`` into calls, or into the ``files`` of a destination (``destinations``). The store's folder is made by
``staging``, and its process has a ``claim`` on it. Imports facts, report and settings.
"""
