"""Plain and speculative decoding, and the acceptance report."""
