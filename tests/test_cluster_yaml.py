"""``cluster.yaml`` is what ``ray up`` takes, by Ray's own schema; no cloud is asked."""

import copy
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def config():
    return yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())


def test_ray_accepts_it(config):
    validate_config(prepare_config(config))


def _without_head(config):
    config["available_node_types"].pop("head")


@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        (lambda config: config.update(max_worker=4), jsonschema.ValidationError),
        (lambda config: config["auth"].update(ssh_usr="ubuntu"), jsonschema.ValidationError),
        (lambda config: config["available_node_types"]["worker"].update(max_wrokers=4), jsonschema.ValidationError),
        (lambda config: config.update(idle_timeout_minutes="five"), jsonschema.ValidationError),
        (lambda config: config.update(max_workers=1), ValueError),
        (_without_head, ValueError),
    ],
    ids=["key", "auth key", "node key", "type", "fewer in all than of one type", "no head"],
)
def test_ray_refuses_it_when_it_is_broken(config, breaks, expected):
    broken = copy.deepcopy(config)
    breaks(broken)
    with pytest.raises(expected):
        validate_config(prepare_config(broken))


def test_workers_come_and_go_and_the_head_runs_no_ranks(config):
    worker, head = config["available_node_types"]["worker"], config["available_node_types"]["head"]
    assert 0 < worker["min_workers"] < worker["max_workers"] <= config["max_workers"]
    assert head["resources"]["CPU"] == 0
    assert config["head_node_type"] == "head"


def test_nodes_have_the_ray_that_is_tested(config):
    pinned = re.search(r"^ray==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert config["docker"]["image"].startswith(f"rayproject/ray:{pinned}-py3")


def test_what_the_comments_say_to_run_is_there():
    text = (REPOSITORY / "cluster.yaml").read_text()
    for script in re.findall(r"python (\S+\.py)", text):
        assert (REPOSITORY / script).is_file()
    source = (REPOSITORY / "jobs/elastic_train.py").read_text()
    for option in set(re.findall(r"(--[a-z-]+)", "".join(re.findall(r"elastic_train\.py.*(?:\n#  .*--.*)?", text)))):
        assert f'"{option}"' in source
