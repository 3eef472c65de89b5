"""From what has survived to where the run goes on."""
