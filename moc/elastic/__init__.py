"""Where replicas of experts are, and which one computes a token, on a number of nodes that changes (Lazarus).

Pure functions of loads and members, without torch and without communication: each rank computes the same.  What the
paper says, and where its rules are corrected, is in ``docs/explanation/lazarus.md``.
"""
