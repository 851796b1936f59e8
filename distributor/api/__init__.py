"""What users ask, checked. Runs on the driver; may import every room."""
