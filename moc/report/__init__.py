"""Reports on a run, from its events.jsonl."""
