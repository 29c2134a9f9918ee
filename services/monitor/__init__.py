"""Collects load reports and leases, and publishes which instances are alive and whether memory is short."""
