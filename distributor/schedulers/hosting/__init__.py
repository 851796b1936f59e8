"""The one way to get an agent for a node. Runs in Spark's Python workers and on the driver, without torch."""
