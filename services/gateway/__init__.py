"""The HTTP door: what OpenAI's clients speak, on top of the SDK. Stateless; any number of them may run."""
