"""The command that simulates."""

import csv
import json
import os
import re
import sys

import numpy
import pytest
import yaml

from megatron.pretraining.planning import simulate, sizes
from tests.cases import each_row
from tests.errors import only_code

TRACE = "2021-12-11, 10:00:00, 8\n2021-12-11, 10:20:00, 6\n2021-12-11, 11:00:00, 8\n"
SMALL = ["--model", "micro", "--cluster", "a100-80gb:16", "--pp", "2", "--ep", "4", "--runs", "2", "--hours", "3"]
DEEPSEEK = ["--model", "deepseek-moe-16b", "--cluster", "a100-80gb:96", "--pp", "12", "--ep", "8", "--runs", "2"]


def told(capsys, *argv):
    assert simulate.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_reproduction_shows_paper_figure_and_own_result(capsys):
    assert simulate.main(["--reproduce", "moevement-fig1"]) == 0
    out = capsys.readouterr().out
    for part in ("paper", "ours", "common law", "mean absolute error", "Failures: ", "Fitted or chosen: 0.24 GB/s"):
        assert part in out
    found = told(capsys, "--reproduce", "moetion-fig9")
    assert [row["paper"] for row in found["rows"]] == [195, 8.5]


def test_paper_figures_require_repository(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.papers.program", None)
    assert simulate.main(["--reproduce", "moevement-fig1"]) == 1
    assert only_code(capsys.readouterr().err) == "repository-missing"


def test_help_example_ranks_policies(capsys):
    found = told(capsys, *DEEPSEEK, "--mtbf", "10m", "--policy", "sparse,full,pec,checkfreq")["policies"]
    assert list(found) == ["sparse", "full", "pec", "checkfreq"]
    assert found["sparse"]["ettr"] > found["full"]["ettr"] > found["checkfreq"]["ettr"]
    for one in found.values():
        parts = sum(one[name] for name in ("useful_s", "saving_s", "slower_s", "recovery_s", "idle_s"))
        assert parts == pytest.approx(one["wall_s"]) and one["wall_s"] == 12 * 3600


def test_micro_batch_size_flag_has_megatron_meaning(capsys):
    of_one, of_all, other = (
        told(capsys, *SMALL, "--policy", "full", *words)["policies"]
        for words in (["--micro-batch-size", "2"], ["--micro-batch", "8"], [])
    )
    assert of_one == of_all != other  # with four expert-parallel ranks


def test_every_snapshot_has_overhead(capsys):
    """Also where all of it hides, and for all policies that save beside training: what was measured, or the paper's."""
    calm = [*DEEPSEEK, "--mtbf", "1h", "--policy", "sparse,pec,full", "--interval", "2"]
    for flags, share in ([], 0.02), (["--snapshot-overhead", "0.05"], 0.05), (["--snapshot-overhead", "0"], 0.0):
        found = told(capsys, *calm, *flags)
        assert found["setup"]["snapshot_overhead"] == share
        overheads = [found["policies"][name]["overhead"] for name in ("sparse", "pec", "full")]
        assert overheads == pytest.approx([share, share / 2, share / 2])


def test_measured_bandwidths_replace_preset(capsys):
    calm = [*DEEPSEEK, "--policy", "sparse", "--mtbf", "1h"]
    measured = told(capsys, *calm, "--host-gbs", "1", "--network-gbs", "2", "--storage-gbs", "3")["setup"]["cluster"]
    rates = [measured[name] for name in ("host_bandwidth", "inter_bandwidth", "storage_bandwidth")]
    assert rates == [1e9, 2e9, 3e9]


@each_row("flags", [[], ["--tp", "2"], ["--tp", "4", "--pp", "1", "--ep", "1"]], ids=str)
def test_model_from_flags_is_simulated_in_several_layouts(capsys, flags):
    shape = ["--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "128"]
    experts = ["--num-experts", "8", "--vocab-size", "1000", "--disable-bias-linear"]
    layout = ["--cluster", "h100-80gb:16", "--pp", "4", "--ep", "2", "--runs", "1", *flags]
    found = told(capsys, *shape, *experts, *layout, "--mtbf", "30m")
    assert set(found["policies"]) == set(simulate.POLICIES)


MICRO = ["--model", "micro", "--cluster", "a100-80gb:16", "--runs", "1", "--hours", "1", "--policy", "full"]
LONG = {
    "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "expert-model-parallel-size": 2,
    "expert-tensor-parallel-size": 1,
}  # fmt: skip


@each_row("form", ["words", "a file", "the dialect"])
def test_layout_options_equal_those_of_megatron(form, capsys, tmp_path):
    short = told(capsys, *MICRO, "--tp", "2", "--pp", "2", "--ep", "2")
    words = [word for name, size in LONG.items() for word in (f"--{name}", str(size))]
    if form == "a file":
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(LONG))
        words = ["--config", str(tmp_path / "file.yaml")]
    elif form == "the dialect":
        words = ["--tp", "2", "--pp", "2", "--moe-expert-parallel-size", "2", "--dialect", "moc"]
        words += ["--expert-tensor-parallel-size", "1"]
    long = told(capsys, *MICRO, *words)
    layout = short["setup"]["layout"]
    assert long["setup"]["layout"] == layout and (layout["tp"], layout["pp"], layout["ep"]) == (2, 2, 2)
    assert long["setup"]["timing"] == short["setup"]["timing"] and layout["expert_tp"] == 1


def test_context_parallelism_is_not_simulated(capsys):
    words = ["--context-parallel-size", "2"]
    assert simulate.main([*MICRO, *words]) == 1
    error = capsys.readouterr().err
    assert only_code(error) == "flag-has-no-effect" and words[0] in error


def test_table_csv_and_plot_are_written(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE)
    out = ["--csv", str(tmp_path / "out.csv"), "--plot", str(tmp_path / "out.png")]
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt"), *out]) == 0
    assert " 1 losses" in capsys.readouterr().out
    with open(tmp_path / "out.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == list(simulate.POLICIES)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gcp.txt", "out.csv", "out.png", "out_dark.png"]


def test_trace_node_counts_limit_available_nodes(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE.replace(" 8", " 2").replace(" 6", " 1"))
    trace = ["--trace", str(tmp_path / "gcp.txt"), "--trace-nodes", "--policy", "full,elastic", "--num-experts", "16"]
    found = told(capsys, *SMALL, *trace)["policies"]
    assert found["full"]["idle_s"] == pytest.approx(2400)
    assert found["elastic"]["idle_s"] == 0 and found["elastic"]["samples"] > found["full"]["samples"]


def test_jobs_continue_with_fewer_nodes(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE.replace(" 8", " 4").replace(" 6", " 2"))
    job = [*SMALL, "--cluster", "a100-80gb:32", "--ep", "1", "--global-batch-size", "480", "--micro-batch", "1"]
    job += [
        "--trace",
        str(tmp_path / "gcp.txt"),
        "--trace-nodes",
        "--policy",
        "elastic,full+shrink,full",
        "--num-experts",
        "16",
    ]
    found = told(capsys, *job, "--grow-wait", "1m")["policies"]
    assert found["elastic"]["ettr"] > found["full+shrink"]["ettr"] > found["full"]["ettr"]
    assert found["full"]["nodes_s"] == pytest.approx({"0": 2400, "4": 8400})
    for name in ("elastic", "full+shrink"):
        assert found[name]["nodes_s"] == pytest.approx({"2": 2400, "4": 8400})
    assert found["full+shrink"]["fell_back"] == 1
    # On two nodes a stage has one, with all experts, so that both lost ones are survived unless they are a stage's.
    assert found["elastic"]["fell_back"] in (0, 0.5, 1)
    assert simulate.main(job) == 0
    out = capsys.readouterr().out
    assert "full+shrink, nodes: 77.8 % on 4, 22.2 % on 2" in out
    assert "full+shrink, from storage 1 times: other number of nodes (2 of 4 nodes lost)" in out


@each_row(
    ("flags", "why"),
    [
        (["--policy", "elastic+shrink"], "[flag-has-no-effect]"),
        (["--policy", "elastic", "--min-nodes", "3"], "[value-out-of-range]"),
        (["--policy", "elastic", "--elastic-slots", "1", "--min-nodes", "1", "--num-experts", "64"], "slots"),
    ],
    ids=str,
)
def test_invalid_elastic_options_are_refused(capsys, flags, why):
    assert simulate.main([*SMALL, *flags]) == 1
    assert why in capsys.readouterr().err


def test_trace_with_decreasing_time_is_used_with_warning(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE + "2021-12-11, 10:59:00, 5\n")
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt"), "--policy", "full"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "warning" in said.err and re.search("gcp.txt: 1 of 4 ", said.err)
    assert " 2 losses" in said.out


def test_auto_reports_choice_and_reason(capsys):
    found = told(capsys, *DEEPSEEK, "--mtbf", "1h", "--policy", "auto", "--exact-only")
    assert found["choice"]["best"].startswith("sparse") and "ETTR" in found["choice"]["reason"]
    assert next(iter(found["policies"])) == found["choice"]["best"]
    assert not any(title.startswith("pec") for title in found["policies"])


def test_profile_replaces_cost_model(capsys, tmp_path):
    start = {"type": "start", "world_size": 16}
    events = [{"type": "iteration", "iteration": n, "elapsed_s": 7.5} for n in range(20)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [start, *events]))
    profiled = [*SMALL, "--profile", str(tmp_path), "--policy", "sparse"]
    assert told(capsys, *profiled)["setup"]["timing"]["iteration_s"] == 7.5
    small = told(capsys, *profiled, "--mtbf", "inf")["policies"]["sparse"]
    scaled = told(capsys, *profiled, "--mtbf", "inf", "--scale-to", "gpus=16384")
    assert scaled["setup"]["cluster"]["gpus"] == 16384 and scaled["setup"]["timing"]["iteration_s"] == 7.5
    assert scaled["policies"]["sparse"]["samples"] == 1024 * small["samples"]


def test_program_recovery_is_shorter_than_papers(capsys, tmp_path):
    calm = [{"type": "iteration", "time": n, "iteration": n, "elapsed_s": 1.0} for n in range(20)]
    lost = [{"type": "inject", "time": 20.0, "action": "kill"}, {"type": "resume", "time": 23.5, "seconds": 0.5}]
    back = [{"type": "start", "time": 24.0, "world_size": 4}, calm[0] | {"time": 26.0, "iteration": 20}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*calm, *lost, *back]))
    fast = [*SMALL, "--profile", str(tmp_path), "--policy", "full,sparse", "--mtbf", "30m"]
    papers, program = (told(capsys, *fast, "--ways", ways)["policies"] for ways in ("papers", "program"))
    for name in ("full", "sparse"):
        assert program[name]["recovery_each_s"] < papers[name]["recovery_each_s"]
    assert program["full"]["recovery_each_s"] > 5.0  # 3 s until all are connected, and so on, and what is replayed


@each_row(
    ("flags", "message"),
    [
        (["--cluster", "b200:8"], "there is no cluster 'b200'"),
        (["--pp", "3"], "not a multiple of tp x pp"),
        (["--policy", "sparze"], "there is no policy 'sparze'"),
        (["--trace", "nowhere.txt"], "nowhere.txt"),
        (["--trace", "t", "--mtbf", "1h"], "[flags-exclude-each-other]"),
        (["--trace", os.devnull], "[file-refused]"),
        (["--scale-to", "16384"], "write gpus=16384"),
        (["--ways", "program"], "[flag-needs-another]"),
        (["--runs", "0"], "--runs is 0"),
        (["--snapshot-overhead", "-1"], "give a share from 0"),
        (["--policy", "auto", "--host-memory-gb", "1e-9"], "no policy keeps to all limits"),
    ],
    ids=str,
)
def test_incompatible_flags_are_refused_in_one_line(capsys, flags, message):
    assert simulate.main([*SMALL, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("simulate: ") and message in error and error.count("\n") == 1


def test_recorded_loads_reduce_selective_token_loss(capsys, tmp_path):
    numpy.savez(tmp_path / "r.npz", tokens=numpy.tile([900, 90, 9, 1], (20, 2, 1)))
    flags = [*SMALL, "--policy", "pec,selective", "--mtbf", "10m", "--host-gbs", "0.003"]
    plain, by_load = told(capsys, *flags), told(capsys, *flags, "--routing", str(tmp_path / "r.npz"))
    plt = [{name: one["plt"] for name, one in found["policies"].items()} for found in (plain, by_load)]
    assert 0 < plt[1]["selective"] < 0.5 * plt[0]["selective"] and plt[1]["pec"] == plt[0]["pec"]
    assert simulate.main([*map(str, SMALL), "--routing", str(tmp_path / "none.npz")]) == 1
    assert only_code(capsys.readouterr().err) == "routing-unreadable"


def test_trace_without_loss_is_refused(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE.splitlines(keepends=True)[0])
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt")]) == 1
    assert only_code(capsys.readouterr().err) == "trace-without-losses"


def test_durations_are_parsed_with_units():
    assert [simulate.duration(text) for text in ("90", "90s", "10m", "2h", "0.5d")] == [90, 90, 600, 7200, 43200]
    for wrong in ("", "m", "-1h", "soon"):
        with pytest.raises(simulate.argparse.ArgumentTypeError):
            simulate.duration(wrong)


def test_global_batch_size_flag_of_megatron_is_accepted(capsys):
    both = [told(capsys, *DEEPSEEK, flag, "1024") for flag in ("--global-batch-size", "--global-batch")]
    assert both[0] == both[1] != told(capsys, *DEEPSEEK)


@each_row("flag", ["--plot", "--csv"])
def test_unwritable_output_is_refused_before_simulation(flag, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(simulate, "_faults", lambda *args: 1 / 0)
    assert simulate.main([*SMALL, flag, str(tmp_path / "file" / "plot.png")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


@each_row(
    ("program", "flag"),
    [
        (simulate, "--vocab-size"), (simulate, "--interval"), (simulate, "--micro-batch"), (simulate, "--host-gbs"),
        (sizes, "--vocab-size"), (sizes, "--world"),
    ],
)  # fmt: skip
def test_zero_does_not_count_as_not_given(program, flag, capsys):
    with pytest.raises(SystemExit):
        program.main(["--model", "tiny", flag, "0"])
    assert f"argument {flag}: '0' is not a number from" in capsys.readouterr().err
