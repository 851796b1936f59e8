"""The live connection between a node and the driver: log lines and events up, orders down.

It carries only what is live. Results and the reasons of failures travel in band, through the Spark job, so a lost
channel costs log lines and speed of reaction, never the truth.
"""
