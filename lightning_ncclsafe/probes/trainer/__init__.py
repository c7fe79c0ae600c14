"""Observes Lightning's Trainer by duck type: its progress, its actions, and what each batch produced.

``state`` is the progress now, ``actions`` what Lightning is doing, and ``steps`` what each batch has done, with its
backward ``passes``. ``gradients``, ``model_units``, ``awaited_works`` and ``unsaved`` read the model and what it sends
or saves; ``logged_keys``, ``setting_lines`` and ``timeout_lines`` search the user's source.
"""
