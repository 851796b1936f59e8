"""Which plans of Spark, as texts, show that their rows have changed; real ones are in ``tests/test_data.py``."""

import pytest

from distributor.data.spark_frames import _shows_rows

FILES = "Relation spark_catalog.default.t[id#1L,sum(x)#2] parquet"


@pytest.mark.parametrize(
    ("plan", "shows"),
    [
        (FILES, True),
        (f"Project [(sum(x)#2 + 1.0) AS (sum(x) + 1)#3]\n+- {FILES}", True),
        (f"Project [f(id#1L)#4 AS y#5]\n+- {FILES}", False),
        (f"Project [f(id#1L)#4L AS f(id)#5L]\n+- {FILES}", False),
        (f"FlatMapCoGroupsInPandas 1, 1, f(id#1L, id#6L)#7, [id#8L]\n:- {FILES}\n+- {FILES}", False),
        (f"Project [id#1L, ... 17 more fields]\n+- {FILES}", False),
        ("HiveTableRelation [`default`.`t`, org.apache.hadoop.hive.serde2.Serde, Data Cols: [id#1L]]", False),
        ("RelationV2[id#1L] local.db.t", False),
        ("Relation [id#1L] JDBCRelation(t) [numPartitions=1]", False),
        ("Relation [key#1] KafkaRelation(strategy=Subscribe[t])", False),
        ("Relation [id#1L] csv", False),
        (f"Join Inner\n:- Relation [a#1] json\n+- {FILES}", False),
        (f"Filter (id#1L > scalar-subquery#4 [])\n+- {FILES}", False),
        (f"Project [now() AS now#4]\n+- {FILES}", False),
        (f"Project [now#4]\n+- {FILES}", True),
    ],
)
def test_a_plan_shows_its_rows_unless_they_come_from_elsewhere(plan, shows):
    assert _shows_rows(plan) == shows
