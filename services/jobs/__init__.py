"""The jobs service: OpenAI's Files and Batches, for requests that need no immediate answer."""
