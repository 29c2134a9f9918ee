"""A worker's place in its group: batches from stage to stage, KV on its way, the carrying out of transitions."""
