"""Live web page of a cluster: workers' memory, requests and transitions, with buttons for load, drops and faults."""
