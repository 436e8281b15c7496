"""Measurements in this process, without HTTP: the engine, its kernels and the machine's limits."""
