"""One instance: engine, memory, scheduling inside the group."""
