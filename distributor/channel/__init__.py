"""Lines between processes. Runs at both ends; may import ``machine``.

The channel between a node and the driver carries only what is live. Results and the reasons of failures travel in band,
through the Spark job, so a lost channel costs log lines and speed of reaction, never the truth.
"""
