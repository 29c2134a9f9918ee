"""Generated from protos/ by `make proto`. Never edited."""
