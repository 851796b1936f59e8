"""DeepSpeed: configurations, ZeRO, tuning, checkpoints and extensions. A wing (see docs/architecture.md)."""
