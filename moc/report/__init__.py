"""What a run was like, from its events.jsonl."""
