"""``horovod.keras``, which is not supported: importing this module raises an error that says what to use."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.keras is not supported, since ranks communicate through torch.distributed: train with "
    'distributor.Distributor(n, launch="tensorflow") and tf.distribute.MultiWorkerMirroredStrategy'
)
