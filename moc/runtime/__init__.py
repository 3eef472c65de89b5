"""Processes that keep a run going: launcher, controller, agents, and what they say to each other."""
