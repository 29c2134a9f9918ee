"""The data plane: links between pairs of workers, which send urgent messages before bulk bytes."""
