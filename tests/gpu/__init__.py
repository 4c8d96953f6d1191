"""Everything that a GPU computes: whether it is right, and how fast. ``python -m tests.gpu OUT``, without Ray.

Each part is a function in a process of its own, with a limit on its time; what it has measured is kept if it fails. On
a machine without a GPU the parts run on the CPU in a small way, but for those that need one.
"""
