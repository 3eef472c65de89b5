"""DeepSpeed's ZeRO optimizer under this project's model, schedule and vote; DeepSpeed's engine is not used."""
