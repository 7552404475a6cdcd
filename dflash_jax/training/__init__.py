"""The drafter step and the loop around it."""
