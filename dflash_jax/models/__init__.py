"""The two networks: the frozen target and the DFlash drafter, and their checkpoint folders."""
