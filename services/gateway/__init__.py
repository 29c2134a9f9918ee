"""The HTTP gateway: OpenAI's and Anthropic's APIs on top of the SDK. Stateless; any number of replicas may run."""
