"""Live web page of a cluster: memory of each worker, requests and transitions, with buttons to
trigger load and faults.
"""
