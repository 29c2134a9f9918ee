"""Decides the layout of the cluster and executes transitions."""
