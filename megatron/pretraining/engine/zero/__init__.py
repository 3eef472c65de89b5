"""Runs DeepSpeed's ZeRO optimizer under this project's model, schedule and commit; without DeepSpeed's engine."""
