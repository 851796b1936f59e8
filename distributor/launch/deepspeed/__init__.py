"""DeepSpeed: configurations, ZeRO, checkpoints and extensions."""
