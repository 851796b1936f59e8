"""The wing for Ray: the launch path as users write it (driver), and the companion that runs Ray on a node."""
