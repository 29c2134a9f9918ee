"""Acting: commands become I/O, outcomes become events."""
