"""A run whose snapshots are in a bucket is killed, started again, and goes on bit-identically."""

import uuid

import pytest

from benchmarks.live.job import Events
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import FLAGS, LAYOUTS, train
from tests.s3_server import s3_server
from tests.worlds import run_world, start_world

pytest.importorskip("s3fs", reason="s3fs is not installed; see the extra [s3]")
pytest.importorskip("moto.server", reason="moto and flask are not installed; see the extra [dev]")


@pytest.mark.recovery
def test_killed_run_resumes_from_bucket_bit_identically(data, tmp_path):
    bucket = f"bucket-{uuid.uuid4().hex}"
    flags = data | dict(ckpt_policy="full", ckpt_dir=f"s3://{bucket}/run", snapshot_interval=2, train_iters=1000)
    size, parallel = LAYOUTS["EP2"]

    def persisted() -> list[int]:
        return [event["iteration"] for event in Events(tmp_path / "events.jsonl").of("persist")]

    with s3_server() as environment:
        told = dict(body="tests.integration.snapshot_bodies:train_in_bucket", bucket=bucket, environment=environment)
        body = told.pop("body")
        first = start_world(size, body, flags=FLAGS | parallel | flags | dict(log_dir=str(tmp_path)), **told)
        wait_for(lambda: first.ended() or persisted())
        first.kill()
        assert {result.exit for result in first.wait()} == {-9}
        stop = dict(exit_interval=persisted()[-1] + 3)
        rest = run_world(size, body, flags=FLAGS | parallel | flags | stop, **told)
    straight = train("EP2", data | dict(train_iters=1000) | stop)
    assert rest[0]["start"] >= persisted()[0] >= 2
    assert rest[0]["records"] == straight.records[rest[0]["start"] :]
    assert all(rest[0]["weights"][box] == straight.weights[box] for box in rest[0]["weights"])
