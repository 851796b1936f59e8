"""Ray: ``path`` runs on the driver and on nodes, ``node`` beside a node's rank."""
