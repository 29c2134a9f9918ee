"""Gathers load reports and leases; says which instances are there and how loaded they are."""
