"""Batches of requests without a deadline of their own: input files, output files, as in OpenAI's API."""
