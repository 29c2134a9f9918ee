"""Replaceable decisions of a worker as functions over plain data: batch forming, admission, preemption."""
