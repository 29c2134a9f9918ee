"""A worker as a member of its group: batches from stage to stage, KV transfers, execution of transitions."""
