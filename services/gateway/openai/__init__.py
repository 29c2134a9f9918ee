"""OpenAI's formats: parsing requests and writing answers. Pure, except for a clock that is passed in."""
