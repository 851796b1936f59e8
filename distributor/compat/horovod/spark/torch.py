"""``horovod.spark.torch``, which is not supported: importing it raises an error that says what to use instead."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.spark.torch is not supported, since ranks cannot get DataFrames: write them to Parquet, and use "
    "distributor.compat.horovod.run with a function that reads its data from files"
)
