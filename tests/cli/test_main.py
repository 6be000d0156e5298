"""The command line as a process: what it imports, how it ends."""

import os
import subprocess
import sys

import pytest
import torch

from ray_dcp import save
from ray_dcp.cli.main import main
from ray_dcp.version import __version__
from tests.catalog.test_listing import commit

COMMAND = [sys.executable, "-c", "import sys; from ray_dcp.cli.main import main; sys.exit(main())"]


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ray-dcp {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["list"], ["show"], ["verify"], ["copy"], ["convert"], ["prune"]])
def test_each_help_ends_with_the_exit_codes(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    epilog = capsys.readouterr().out.partition("exit codes:\n")[2]
    assert [line.split()[0] for line in epilog.splitlines()] == ["0", "1", "2", "3", "4", "5", "130"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list"],
        ["nope"],
        ["list", "a", "b"],
        ["show", "x", "--nope"],
        ["convert", "x"],
        ["convert", "x", "y", "--to", "gguf"],
        ["prune"],
        ["prune", "x", "--grace", "soon"],
        ["verify"],
        ["verify", "x", "--sample", "0%"],
        ["verify", "x", "--sample", "some"],
        ["copy", "x"],
    ],
)
def test_wrong_usage_is_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "list {root}",
        "show {root}/step-1",
        "show --plan {root}/step-1",
        "prune {root}",
        "verify {root}/step-1",
        "copy {root}/step-1 {root}/step-2",
    ],
)
def test_neither_ray_nor_torch_is_imported(tmp_path, command):
    save({"weight": torch.ones(4), "step": 1, "odd": {1, 2}}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    script = """if True:
        import sys
        from ray_dcp.cli.main import main
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        print([name for name in ("ray", "torch") if name in sys.modules], file=sys.stderr)
        sys.exit(code)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, *command.format(root=tmp_path).split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_installed_command_runs(tmp_path):
    command = os.path.join(os.path.dirname(sys.executable), "ray-dcp")
    if not os.path.exists(command):
        pytest.skip("ray_dcp is not installed")
    done = subprocess.run([command, "list", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"no checkpoints under {tmp_path}: the folder is empty\n")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "usage: ray-dcp"),
        (["lst", "x"], 2, "invalid choice"),
        (["verify", "x", "--sample", "0%"], 2, "not a share of the blocks"),
        (["verify", ""], 2, "ray-dcp: CKPT: is empty"),
        (["list", "hdfs://a/b"], 2, "unknown scheme hdfs://"),
        (["list", "s3://b/x?nope=1"], 2, "unknown parameter 'nope'"),
        (["list", "{tmp}/nothing"], 3, "nothing is there"),
        (["show", "{tmp}/torn"], 5, "is not readable metadata"),
        (["copy", "{tmp}/nothing", "{tmp}/there"], 3, "nothing is there"),
        (["list", "{tmp}/" + "long" * 100], 4, "File name too long"),
    ],
)
def test_the_installed_command_exits_as_its_help_says(tmp_path, arguments, code, told):
    command = os.path.join(os.path.dirname(sys.executable), "ray-dcp")
    if not os.path.exists(command):
        pytest.skip("ray_dcp is not installed")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / ".metadata").write_bytes(b"torn")
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    done = subprocess.run([command, *given], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error_to_show(tmp_path):
    for step in range(300):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/.metadata").write_bytes(b"")
    listing = subprocess.Popen(
        [*COMMAND, "list", str(tmp_path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    listing.stdout.close()
    assert listing.stderr.read() == b""
    assert listing.wait() == 1


def test_an_interrupt_is_quiet(tmp_path):
    script = """if True:
        import os, signal, sys
        from ray_dcp.cli.main import main
        os.scandir = lambda path: os.kill(os.getpid(), signal.SIGINT)
        sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", script, "list", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_name_that_the_terminal_cannot_show_is_no_error(tmp_path):
    commit(str(tmp_path), "step-1", metrics={"\u65e5\u672c": 1})
    done = subprocess.run(
        [*COMMAND, "list", str(tmp_path)],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u65e5\\u672c=1" in done.stdout
