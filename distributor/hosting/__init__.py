"""Start agents. This package runs in Spark's Python workers and on the driver: standard library only, no torch."""
