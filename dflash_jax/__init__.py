"""Train, evaluate and export DFlash drafters: block-diffusion models for lossless speculative decoding, in JAX."""

__version__ = "0.1.0"
