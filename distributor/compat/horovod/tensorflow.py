"""``horovod.tensorflow``, which is not here: importing this module says what to do instead."""

from distributor.errors import ConfigurationError

raise ConfigurationError(
    "horovod.tensorflow is not here, since ranks talk through torch.distributed: train with "
    'distributor.Distributor(n, launch="tensorflow") and tf.distribute.MultiWorkerMirroredStrategy'
)
