"""What the jobs service decides: no clock, no I/O."""
