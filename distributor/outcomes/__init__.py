"""From what came back to values or one exception. Runs on the driver, pure; may import ``shipping``."""
