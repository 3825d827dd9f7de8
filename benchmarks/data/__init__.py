"""Loading samples: the kit's loader beside what others use, on the same data and in the same run.

``python -m benchmarks.data.tensors``, ``large``, ``images``, ``cold`` and ``memory`` run; the other modules are what
they are made of. ``benchmarks/README.md`` says what to install for which competitor.
"""
