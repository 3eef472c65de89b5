"""Places expert replicas and dispatches tokens on a changing number of nodes (Lazarus).

Pure functions of loads and active nodes, without torch or communication: all ranks compute the same results.
``docs/explanation/lazarus.md`` describes the paper and the corrections of its rules.
"""
