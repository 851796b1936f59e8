"""Launch paths: pure decisions about how ranks are started. Runs everywhere; may import ``machine``."""
