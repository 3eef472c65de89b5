"""The launcher's command line."""

import pytest

import moc
from moc.launch import parse, warning_of_one_endpoint
from moc.runtime.hangs import CAPS

ENDPOINT = ("--rdzv-endpoint", "node0:29500")


def parsed(*flags):
    return parse([*flags, __file__, "--nnodes", "9"])


def test_one_machine_needs_no_flags():
    flags = parsed()
    assert (flags.nnodes, flags.nproc_per_node, flags.spares, flags.node_rank) == (1, 1, 0, 0)
    assert flags.alone and flags.endpoints == ("127.0.0.1:0",) and flags.own_controllers
    assert flags.command == [__file__, "--nnodes", "9"] and flags.hang_caps == CAPS


def test_it_names_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"mocrun {moc.__version__}\n"


def test_spares_are_numbered_behind_the_nodes():
    assert parsed("--nnodes", "2", "--spares", "1", "--node-rank", "2", *ENDPOINT).node_rank == 2
    with pytest.raises(SystemExit):
        parsed("--nnodes", "2", "--spares", "1", "--node-rank", "3", *ENDPOINT)


def test_what_spares_of_this_machine_are_started_with():
    flags = parsed("--standalone", "--nproc-per-node", "4", "--spares", "1", "--")
    assert flags.alone and flags.own == ["--nproc-per-node", "4", "--spares", "1"]
    spare = parse([*flags.own, "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:5", *flags.command])
    assert not spare.alone and (spare.node_rank, spare.nproc_per_node, spare.endpoints) == (1, 4, ("127.0.0.1:5",))


@pytest.mark.parametrize(
    "given, endpoint",
    [
        ("node0", "node0:29400"),
        ("node0:5", "node0:5"),
        ("[::1]:5", "[::1]:5"),
        ("[fe80::1]", "[fe80::1]:29400"),
        ("fe80::1", "[fe80::1]:29400"),
    ],
)
def test_where_the_controller_is(given, endpoint):
    assert parsed("--rdzv-endpoint", given).endpoints == (endpoint,)
    assert parsed("--rdzv-endpoint", given, "--standalone").endpoints == ("127.0.0.1:0",)


def test_several_nodes_may_have_the_controller():
    flags = parsed("--nnodes", "3", "--rdzv-endpoint", "h0:5,h1,[::1]:6")
    assert flags.endpoints == ("h0:5", "h1:29400", "[::1]:6")
    assert not parsed("--nnodes", "3", "--rdzv-endpoint", "ctl:5", "--no-controller").own_controllers


THREE = ("--nnodes", "3", "--rdzv-endpoint", "h0,h1,h2")


@pytest.mark.parametrize(
    "flags, names",
    [
        (("--nnodes", "3", *ENDPOINT), ("--rdzv-endpoint", "--no-controller", "--patience", "60 s")),
        (
            ("--nnodes", "2:4", *ENDPOINT, "--patience", "5"),
            ("--rdzv-endpoint", "--no-controller", "--patience", "5 s"),
        ),
        (("--nnodes", "2", *ENDPOINT), ("--spares 1", "--rdzv-endpoint", "--no-controller")),  # two are no majority
        (("--nnodes", "3", *ENDPOINT, "--node-rank", "1"), None),  # the first node alone prints it
        (("--nnodes", "3", *ENDPOINT, "--no-controller"), None),
        (THREE, None),
        (("--spares", "1"), None),  # all of it is on this machine
        ((), None),
    ],
)
def test_a_sole_candidate_for_the_controller_is_announced(flags, names):
    warning = warning_of_one_endpoint(parsed(*flags))
    assert (warning is None) == (names is None)
    assert all(name in (warning or "") for name in names or ())


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (("--nnodes", "2"), "--rdzv-endpoint"),
        (("--spares", "1", "--node-rank", "1"), "--rdzv-endpoint"),
        (("--spares", "-1"), "--spares"),
        (("--nnodes", "2", "--rdzv-endpoint", "a,b,c"), "--rdzv-endpoint names 3 nodes, and the job has 2"),
        (("--no-controller",), "--no-controller needs --rdzv-endpoint"),
        (("--node-rank", "1"), "--node-rank must be from 0 to 0"),
        (("--hang-timeout", "stop=3"), "there is no section 'stop'"),
        (("--network-interface", "nosuch0"), "the network interface nosuch0 has no address here: choose one of lo"),
        (("--silence-timeout", "0"), "--silence-timeout 0 leaves no time"),
        (("--max-wait", "-1"), "--max-wait -1 leaves no time"),
    ],
)
def test_a_mistake_is_named(flags, complaint, capsys):
    with pytest.raises(SystemExit) as leaving:
        parsed(*flags)
    assert leaving.value.code == 2 and complaint in capsys.readouterr().err
