"""A Spark Connect server with its own master and settings. It prints its port, and ends with its standard input."""

import json
import sys

import sessions  # noqa: F401  # settings of all sessions of tests
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
for name, value in json.loads(sys.argv[2]).items():
    builder = builder.config(name, value)
builder = builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
session = builder.config("spark.connect.grpc.binding.port", "0").getOrCreate()
service = getattr(session._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
print(getattr(service, "MODULE$").localPort(), flush=True)
sys.stdin.read()
session.stop()
