"""``horovod.spark.keras``, which is not here: importing this module says what to do instead."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.spark.keras is not here, since DataFrames are not passed to ranks: write them to Parquet, and use "
    'distributor.Distributor(n, launch="tensorflow") with a function that reads its data from files'
)
