"""Compiled kernels for CPUs: one shared object, built beforehand (`build.py`) and called through ctypes."""
