"""Fault-tolerant job processes: launcher, controller, agents, forkservers, replica servers, and their wire protocol."""
