"""One instance of the model: its engine, its memory, and its scheduling within a group."""
