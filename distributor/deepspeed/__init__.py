"""DeepSpeed: configurations, ZeRO, tuning, checkpoints and extensions. A wing: no room imports it."""
