"""TensorFlow: ``path`` runs on the driver and on nodes, ``keras`` in ranks."""
