"""``horovod.spark.lightning``, which is not here: importing this module says what to do instead."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.spark.lightning is not here, since DataFrames are not passed to ranks: write them to Parquet, and use "
    "distributor.compat.horovod.run with a function that reads its data from files"
)
