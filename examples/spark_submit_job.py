"""A job for ``spark-submit``: train the digits example on the cluster's executors, and print the accuracy.

::

    spark-submit --master spark://host:7077 examples/spark_submit_job.py --num-processes 4

Options after the file's name are the job's own. For YARN, Kubernetes and standalone clusters, see docs/clusters.md.
"""

from __future__ import annotations

import argparse

from digits import train  # from the file digits.py in this folder; the function is shipped to the executors by value
from pyspark.sql import SparkSession

from distributor import TorchDistributor, TrainingError


def main() -> None:
    """Parse the job's options and train. If a rank fails, end with its error."""
    parser = argparse.ArgumentParser(description="Train the digits example on Spark executors.")
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--use-gpu", action="store_true")
    options = parser.parse_args()

    spark = SparkSession.builder.appName("digits").getOrCreate()
    try:
        distributor = TorchDistributor(options.num_processes, local_mode=False, use_gpu=options.use_gpu)
        run = distributor.submit(train, epochs=options.epochs)
        result = run.result()
        print(run.placement)
        print(f"accuracy {result['accuracy']:.4f}")
    except TrainingError as error:
        raise SystemExit(str(error)) from None
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
