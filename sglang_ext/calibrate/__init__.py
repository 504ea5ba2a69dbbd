"""``conflux calibrate``: what this device computes and reads with S of its TPCs, measured into a device profile.

``sets`` says which TPCs to measure, ``measure`` does it in a child process that may hang, ``run`` supervises that,
``curve`` and ``assemble`` turn timings into a profile, ``plot`` draws it, ``command`` is the command.
"""
