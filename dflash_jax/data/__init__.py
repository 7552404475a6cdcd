"""Conversations -> token records -> planned batches."""
