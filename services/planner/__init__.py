"""Decides the layout of the cluster and carries plans out."""
