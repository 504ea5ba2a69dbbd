"""``conflux doctor``: what this machine can do, what conflux will do on it, and what could be changed.

``facts`` holds what was found out and ``gather`` finds it; ``probe`` talks to PyTorch and the driver, in a process of
its own, and ``probed`` is what it said; ``advice`` judges, ``render`` prints, ``command`` is the command.
"""
