"""Whole saves and loads on a real S3 server: the same bits come back."""

from urllib.parse import quote

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointManager, LocalShards
from ray_dcp.catalog.listing import list_checkpoints
from ray_dcp.catalog.newest import latest_checkpoint
from ray_dcp.cli.main import main
from ray_dcp.format.names import METADATA, new_attempt
from ray_dcp.store.bucket.s3_options import S3Options
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.open import open_store
from tests.ranks import ThreadRanks, require_no_errors
from tests.store.seaweed import ACCESS_KEY, HIDDEN_KEYS, SECRET_KEY

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)


def bits(seed, nbytes):
    """Random bytes, NaNs of every kind among them."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def state(seed):
    flat = {str(dtype): bits(seed + n, 4096) for n, dtype in enumerate(DTYPES)}
    tensors = {name: raw.view(getattr(torch, name.removeprefix("torch."))) for name, raw in flat.items()
               if name != "torch.bool"}  # fmt: skip
    return tensors | {
        "torch.bool": flat["torch.bool"] > 127,
        "large": bits(seed, 24_000_000),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(seed)),
        "nested": {"step": seed, "names": ["a", "b"]},
    }


def template(held):
    filled = {name: torch.zeros_like(value) for name, value in held.items() if isinstance(value, torch.Tensor)}
    return filled | {"nested": {"step": -1, "names": ["", ""]}}


def require_same(found, expected):
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            same = torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
            assert same, f"{name} differs"
        else:
            assert found[name] == value


def test_a_checkpoint_comes_back_bit_for_bit(s3_url):
    saved = state(1)
    dcp.save(saved, checkpoint_id=f"{s3_url}/step", no_dist=True)
    found = template(saved)
    report = dcp.load(found, checkpoint_id=f"{s3_url}/step", no_dist=True)
    require_same(found, saved)
    assert report.missing == ()
    assert [one.key for one in open_store(s3_url).list() if one.key.endswith(METADATA)] == [f"step/{METADATA}"]


def test_a_url_with_everything_in_it_needs_no_environment(seaweed, monkeypatch):
    monkeypatch.delenv("RAY_DCP_S3_ENDPOINT", raising=False)
    options = S3Options(
        endpoint=f"http://{seaweed.endpoint}",
        region="us-east-1",
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        part_nbytes=1 << 20,
        max_parallel=3,
    )
    url = options.url(f"{seaweed.new_url()}/step")
    saved = state(2)
    dcp.save(saved, checkpoint_id=url, no_dist=True)
    found = template(saved)
    dcp.load(found, checkpoint_id=url, no_dist=True)
    require_same(found, saved)


def test_what_two_ranks_saved_three_load(s3_url):
    values = bits(3, 6_000_000).reshape(6, -1)

    def shard(rank, world_size, source):
        rows = 6 // world_size
        return LocalShards((6, 1_000_000), {(rows * rank, 0): source[rows * rank : rows * (rank + 1)].clone()})

    require_no_errors(ThreadRanks(2).save(lambda rank: {"w": shard(rank, 2, values)}, f"{s3_url}/step"))
    found = [{"w": shard(rank, 3, torch.zeros_like(values))} for rank in range(3)]
    require_no_errors(ThreadRanks(3).load(found, f"{s3_url}/step"))
    assert torch.equal(torch.cat([chunk for one in found for chunk in one["w"].chunks.values()]), values)


def test_saving_again_replaces_what_was_there(s3_url):
    for seed in (4, 5):
        dcp.save(state(seed), checkpoint_id=f"{s3_url}/step", no_dist=True)
        found = template(state(seed))
        dcp.load(found, checkpoint_id=f"{s3_url}/step", no_dist=True)
        require_same(found, state(seed))


def test_a_manager_finds_its_steps(s3_url):
    manager = CheckpointManager(s3_url)
    assert manager.latest() is None
    for step in (1, 2, 10):
        manager.save(step, {"w": torch.full((3,), float(step))}, metrics={"loss": 1 / step})
    assert [info.step for info in manager.list()] == [1, 2, 10]
    latest = manager.latest()
    assert (latest.step, latest.metrics, latest.checkpoint_id) == (10, {"loss": 0.1}, f"{s3_url}/step-00000010")
    found = {"w": torch.zeros(3)}
    assert manager.load(found) == 10
    assert found["w"].tolist() == [10.0] * 3
    assert manager.load(found, step=2) == 2
    assert found["w"].tolist() == [2.0] * 3
    manager.async_save(11, {"w": torch.full((3,), 11.0)})
    manager.close()
    assert latest_checkpoint(s3_url).step == 11


def test_prune_removes_what_a_failed_save_left_and_nothing_else(s3_url, capsys):
    CheckpointManager(s3_url).save(1, {"w": torch.ones(3)})
    before = [one.key for one in open_store(s3_url).list()]
    left = f"step-00000002/__0_0_{new_attempt()}.distcp"
    open_store(s3_url).put(left, b"half of it")
    assert main(["prune", s3_url, "--grace", "0"]) == 0
    assert left in capsys.readouterr().out
    assert [one.key for one in open_store(s3_url).list()] == before
    assert main(["list", s3_url]) == 0
    assert "step-00000001" in capsys.readouterr().out
    assert [info.step for info in list_checkpoints(s3_url)] == [1]


@pytest.mark.parametrize("action", ["save", "load"])
def test_keys_in_a_url_are_in_no_message(seaweed, action, caplog, monkeypatch):
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("RAY_DCP_RETRY_INITIAL_BACKOFF_S", "0.01")
    options = S3Options(
        endpoint="http://127.0.0.1:1",
        region="r",
        **HIDDEN_KEYS,
    )
    url = join_url(options.url(seaweed.new_url()), "step")
    call = dcp.save if action == "save" else dcp.load
    with pytest.raises(dcp.CheckpointException) as caught:
        call({"w": torch.ones(2)}, checkpoint_id=url, no_dist=True)
    assert "2 attempts" in str(caught.value)
    assert "hidden" not in str(caught.value) + caplog.text


def test_keys_in_a_url_are_not_stored_with_the_checkpoint(seaweed):
    url = S3Options(
        endpoint=f"http://{seaweed.endpoint}", region="us-east-1", access_key=ACCESS_KEY, secret_key=SECRET_KEY
    ).url(seaweed.new_url())
    CheckpointManager(url).save(1, {"w": torch.ones(2)})
    store = open_store(url)
    for one in store.list():
        content = store.get(one.key)
        assert not any(key.encode() in content for key in (SECRET_KEY, quote(SECRET_KEY, "")))


@pytest.mark.parametrize("name", ["run 7 + more", "100%20%", "läuft?"])
def test_every_command_takes_a_prefix_of_any_name(s3_url, tmp_path, name, capsys):
    """A question mark is the one letter that a URL cannot have in a key; below the URL there may be any."""
    root = s3_url if "?" in name else f"{s3_url}/{name}"
    saved = {"w": bits(1, 1000)}
    manager = CheckpointManager(root)
    manager.save(1, saved)
    manager.save(2, saved)
    assert [info.checkpoint_id for info in manager.list()] == [f"{root}/step-0000000{step}" for step in (1, 2)]
    found = {"w": torch.zeros(1000, dtype=torch.uint8)}
    assert manager.load(found) == 2
    require_same(found, saved)
    if "?" in name:
        open_store(root).put(f"{name}/notes?.txt", b"x")
        assert f"{name}/notes?.txt" in [one.key for one in open_store(root).list()]
        assert open_store(root).get(f"{name}/notes?.txt") == b"x"
    place = f"{root}/step-00000001"
    open_store(root).put(f"step-00000003/__0_0_{'0' * 24}.distcp", b"left by a killed save")
    for command in (["list", root], ["show", place], ["verify", place], ["verify", "--all", root]):
        assert main(command) == 0, command
    assert main(["prune", root, "--grace", "0"]) == 0
    assert not any("step-00000003/_" in one.key for one in open_store(root).list())
    assert main(["copy", place, f"{root} (copy)"]) == 0
    assert main(["copy", f"{root} (copy)", str(tmp_path / "back")]) == 0
    assert main(["verify", str(tmp_path / "back")]) == 0
    assert "step-00000001" in capsys.readouterr().out


def test_a_bucket_that_does_not_exist_is_no_empty_root(s3_url, capsys):
    """Only its absence is asked for: the server makes a bucket when something is put there."""
    root = "s3://no-such-bucket-of-ours/run"
    manager = CheckpointManager(root)
    state = {"w": torch.ones(1)}
    for call in (
        lambda: manager.load(state),
        lambda: manager.load(state, step=3),
        lambda: manager.latest(),
        lambda: manager.list(),
        lambda: dcp.load(state, checkpoint_id=f"{root}/step-00000003", no_dist=True),
    ):
        with pytest.raises(FileNotFoundError, match="there is no bucket 'no-such-bucket-of-ours'"):
            call()
    for command in (["list", root], ["show", root], ["verify", root], ["prune", root], ["verify", "--all", root]):
        assert main(command) == 3
        assert "no bucket" in capsys.readouterr().err
    assert CheckpointManager(s3_url).load(state) is None


def test_what_a_url_says_beside_its_place_is_in_no_message_and_no_log(seaweed, monkeypatch, caplog, capsys, tmp_path):
    for name in seaweed.variables():
        monkeypatch.delenv(name, raising=False)
    options = S3Options(
        endpoint=f"http://{seaweed.endpoint}", region="us-east-1", access_key=ACCESS_KEY, secret_key=SECRET_KEY
    )
    root = options.url(seaweed.new_url())
    manager = CheckpointManager(root)
    caplog.set_level("DEBUG")
    state = {"w": bits(1, 5000)}
    for step in (1, 2, 3):
        manager.save(step, state)
    place = manager.checkpoint_id(3)
    store = open_store(place)
    (shard,) = [one.key for one in store.list() if one.key.endswith(".distcp")]
    told = []
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=place, no_dist=True)
    told.append(str(caught.value))
    store.delete(shard)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(5000, dtype=torch.uint8)}, checkpoint_id=place, no_dist=True)
    told.append(str(caught.value))
    assert manager.latest().step == 2
    assert manager.load({"w": torch.zeros(5000, dtype=torch.uint8)}, step=3, fallback=True) == 2
    told.append(repr(manager.last_load))
    store.put(METADATA, b"torn")
    for command in (["list", root], ["show", place], ["verify", place], ["verify", root], ["verify", "--all", root]):
        main(command)
    for command in (["prune", root], ["copy", place, str(tmp_path / "a")], ["copy", place, root], ["show", root]):
        main(command)
    for command in (["copy", manager.checkpoint_id(1), manager.checkpoint_id(2)], ["list", root + "&nope=1"]):
        main(command)
    printed = capsys.readouterr()
    text = "\n".join([*told, caplog.text, printed.out, printed.err])
    assert text.count("s3://bucket/") > 10
    for secret in (SECRET_KEY, "tests%2Bsecret", f"{ACCESS_KEY}:", "endpoint_override", "us-east-1", "?"):
        assert secret not in text, secret
