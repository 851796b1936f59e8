"""DeepSpeed: configurations, ZeRO, tuning, checkpoints, extensions. A wing: no room imports it."""
