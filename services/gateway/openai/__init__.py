"""OpenAI's formats: parsing requests and writing answers. Pure: no clock, no I/O."""
