"""GPU kernels: which there are, how they are compiled, kept and loaded, and whether they can run here.

Nothing of CUDA is imported before it is used: all of this can be asked on a machine without it.
"""
