"""The embedded target of the quickstart: a small Qwen3 model, the program that makes its data, and its making."""
