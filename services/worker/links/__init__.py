"""The data plane: links between two workers, urgent messages before bulk bytes."""
