"""Collects load reports and leases; publishes which instances are alive, and memory pressure."""
