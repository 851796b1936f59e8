"""Where agents come from. Runs in Spark's Python workers and on the driver; standard library only, no torch."""
