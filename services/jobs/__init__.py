"""Batches of requests that have time: files in, files out, as OpenAI has them."""
