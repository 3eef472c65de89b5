"""Processes that keep a job alive: launcher, controller, agents, zygotes, replica servers, and their wire protocol."""
