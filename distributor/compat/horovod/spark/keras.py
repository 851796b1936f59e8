"""``horovod.spark.keras``, which is not supported: importing it raises an error that says what to use instead."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.spark.keras is not supported, since ranks cannot get DataFrames: write them to Parquet, and use "
    'distributor.Distributor(n, launch="tensorflow") with a function that reads its data from files'
)
