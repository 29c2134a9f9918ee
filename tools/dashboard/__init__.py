"""One page that shows a cluster live: memory of each worker, requests, transitions, and buttons to try it with."""
