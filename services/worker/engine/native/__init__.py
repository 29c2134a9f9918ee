"""Compiled kernels for CPUs: a shared object, built beforehand (`build.py`) and called through ctypes."""
