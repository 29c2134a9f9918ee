"""OpenAI's shapes: what requests say, and how answers are written. Pure but for the clock that is handed in."""
