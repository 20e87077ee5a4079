"""Triton kernels on nested weights: made for Hopper, correct from SM 8.0 on."""
