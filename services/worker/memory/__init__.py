"""Device memory: extents of one budget, mapped into address ranges that are reserved once."""
