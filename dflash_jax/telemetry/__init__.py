"""Metrics from the device to files and screens, without stopping the step."""
