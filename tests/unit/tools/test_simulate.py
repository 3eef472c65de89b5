"""The command, and how near the figures of the papers it comes."""

import csv
import json
import os

import _reproduce
import pytest
import simulate

TRACE = "2021-12-11, 10:00:00, 8\n2021-12-11, 10:20:00, 6\n2021-12-11, 11:00:00, 8\n"
SMALL = ["--model", "micro", "--cluster", "a100-80gb:16", "--pp", "2", "--ep", "4", "--runs", "2", "--hours", "3"]
DEEPSEEK = ["--model", "deepseek-moe-16b", "--cluster", "a100-80gb:96", "--pp", "12", "--ep", "8", "--runs", "2"]


def told(capsys, *argv):
    assert simulate.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def table_3():
    return _reproduce.table_3()


def errors(found):
    return [error for row in found.rows if row.kind == "ettr" for error in row.errors()]


def test_table_3_of_moevement(table_3):
    ettr = errors(table_3)
    assert len(ettr) == 60 and sum(ettr) / 60 <= 2 and max(ettr) <= 5
    assert table_3.order_right == (20, 20)


def test_every_row_with_failures_stands_under_the_common_law_too(table_3):
    """At 10 minutes, where the number of failures was fitted; elsewhere Table 3's law is the common one."""
    rows = [row for row in table_3.rows if row.kind == "ettr"]
    assert all((row.common != row.ours) == (", 10 min," in row.label) for row in rows)
    common = [error for row in rows for error in row.errors(common=True)]
    assert len(common) == 60 and max(common) > 2 * max(errors(table_3))
    headline = "\n".join(table_3.summary())
    assert f"worst {max(common):.1f}" in headline and f"worst {max(errors(table_3)):.1f}" in headline
    assert "0.24 GB/s" in headline and "155 s" in headline and "where 600 s are named" in headline


def test_gemini_s_oracle_chooses_intervals_like_the_paper_s(table_3):
    intervals = [row for row in table_3.rows if "interval" in row.label]
    assert len(intervals) == 4 and max(row.error for row in intervals) <= 1.5


def test_table_7_of_moevement():
    found = _reproduce.table_7()
    ettr = errors(found)
    assert len(ettr) == 44 and sum(ettr) / 44 <= 3 and max(ettr) <= 6
    assert found.order_right == (15, 15)
    intervals = [row for row in found.rows if "interval" in row.label]
    beyond = [row.label.split(", Gemini")[0] for row in intervals if row.error > 1.5]
    assert beyond == ["FP8, FP32, FP32+FP32, 60 min", "FP8, FP8, FP8+FP16, 60 min"]  # docs/simulate.md says why
    assert max(row.error for row in intervals) < 1.6


def test_figure_11_of_moevement():
    found = _reproduce.figure_11()
    assert max(errors(found)) <= 4
    printed = {row.label: row.ours for row in found.rows}
    assert printed["671B, 10 min, MoEvement"] > printed["671B, 10 min, Gemini"] + 0.2


def test_sizes_and_lost_tokens():
    full, ours, partial = (_reproduce.REPRODUCTIONS[f"{name}"]() for name in ("moc-fig10", "moc-fig15", "moetion-fig9"))
    assert all(row.errors()[0] <= 1.5 for row in full.rows if "K = 1, " not in row.label)
    assert all(row.holds for row in ours.rows if row.bound)
    assert all(row.error <= 1.1 for row in partial.rows)


def test_what_is_further_off_than_the_paper_s_figure_is_no_bound_that_holds():
    """59 % where the paper has 29 % is an error of 30 points, though the paper's reduction is reached."""
    worst = max(_reproduce.REPRODUCTIONS["moc-fig10"]().rows, key=lambda row: abs(row.error))
    assert (worst.paper, round(worst.ours)) == (29, 59) and worst.errors() == [pytest.approx(30.2, abs=0.1)]


def test_the_paper_s_figure_is_beside_ours(capsys):
    assert simulate.main(["--reproduce", "moevement-fig1"]) == 0
    out = capsys.readouterr().out
    for part in ("paper", "ours", "common law", "mean absolute error", "Failures: ", "Fitted or chosen: 0.24 GB/s"):
        assert part in out
    found = told(capsys, "--reproduce", "moetion-fig9")
    assert [row["paper"] for row in found["rows"]] == [195, 8.5]


def test_the_example_of_the_help(capsys):
    found = told(capsys, *DEEPSEEK, "--mtbf", "10m", "--policy", "sparse,full,pec,checkfreq")["policies"]
    assert list(found) == ["sparse", "full", "pec", "checkfreq"]
    assert found["sparse"]["ettr"] > found["full"]["ettr"] > found["checkfreq"]["ettr"]
    for one in found.values():
        parts = sum(one[name] for name in ("useful_s", "saving_s", "slower_s", "recovery_s", "idle_s"))
        assert parts == pytest.approx(one["wall_s"]) and one["wall_s"] == 12 * 3600


def test_no_snapshot_is_for_nothing(capsys):
    """Also where all of it hides, and for all policies that save beside training: what was measured, or the paper's."""
    calm = [*DEEPSEEK, "--mtbf", "1h", "--policy", "sparse,pec,full", "--interval", "2"]
    for flags, share in ([], 0.02), (["--snapshot-overhead", "0.05"], 0.05), (["--snapshot-overhead", "0"], 0.0):
        found = told(capsys, *calm, *flags)
        assert found["setup"]["snapshot_overhead"] == share
        overheads = [found["policies"][name]["overhead"] for name in ("sparse", "pec", "full")]
        assert overheads == pytest.approx([share, share / 2, share / 2])


def test_bandwidths_that_were_measured_take_the_place_of_the_preset_s(capsys):
    calm = [*DEEPSEEK, "--policy", "sparse", "--mtbf", "1h"]
    measured = told(capsys, *calm, "--host-gbs", "1", "--network-gbs", "2", "--storage-gbs", "3")["setup"]["cluster"]
    rates = [measured[name] for name in ("host_bandwidth", "inter_bandwidth", "storage_bandwidth")]
    assert rates == [1e9, 2e9, 3e9]


@pytest.mark.parametrize("flags", [[], ["--tp", "2"], ["--tp", "4", "--pp", "1", "--ep", "1"]], ids=str)
def test_layouts_of_a_model_from_flags(capsys, flags):
    shape = ["--num-layers", "6", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "128"]
    experts = ["--num-experts", "8", "--vocab-size", "1000", "--disable-bias-linear"]
    layout = ["--cluster", "h100-80gb:16", "--pp", "4", "--ep", "2", "--runs", "1", *flags]
    found = told(capsys, *shape, *experts, *layout, "--mtbf", "30m")
    assert set(found["policies"]) == set(simulate.POLICIES)


def test_table_csv_and_picture(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE)
    out = ["--csv", str(tmp_path / "out.csv"), "--plot", str(tmp_path / "out.png")]
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt"), *out]) == 0
    assert "1 losses in the trace" in capsys.readouterr().out
    with open(tmp_path / "out.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == list(simulate.POLICIES)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gcp.txt", "out.csv", "out.png"]


def test_a_trace_that_says_how_many_nodes_there_are(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE.replace(" 8", " 2").replace(" 6", " 1"))
    trace = ["--trace", str(tmp_path / "gcp.txt"), "--trace-nodes", "--policy", "full,elastic"]
    found = told(capsys, *SMALL, *trace)["policies"]
    assert found["full"]["idle_s"] == pytest.approx(2400)
    assert found["elastic"]["idle_s"] == 0 and found["elastic"]["samples"] > found["full"]["samples"]


def test_a_trace_whose_time_steps_back_is_used_with_a_warning(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE + "2021-12-11, 10:59:00, 5\n")
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt"), "--policy", "full"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "warning" in said.err and "gcp.txt: 1 of 4 lines are earlier" in said.err
    assert "2 losses in the trace" in said.out


def test_auto_says_what_it_takes_and_why(capsys):
    found = told(capsys, *DEEPSEEK, "--mtbf", "1h", "--policy", "auto", "--exact-only")
    assert found["choice"]["best"].startswith("sparse") and "ETTR" in found["choice"]["reason"]
    assert next(iter(found["policies"])) == found["choice"]["best"]
    assert not any(title.startswith("pec") for title in found["policies"])


def test_a_profile_takes_the_place_of_the_cost_model(capsys, tmp_path):
    start = {"type": "start", "world_size": 16}
    events = [{"type": "iteration", "iteration": n, "elapsed_s": 7.5} for n in range(20)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [start, *events]))
    profiled = [*SMALL, "--profile", str(tmp_path), "--policy", "sparse"]
    assert told(capsys, *profiled)["setup"]["timing"]["iteration_s"] == 7.5
    small = told(capsys, *profiled, "--mtbf", "inf")["policies"]["sparse"]
    scaled = told(capsys, *profiled, "--mtbf", "inf", "--scale-to", "gpus=16384")
    assert scaled["setup"]["cluster"]["gpus"] == 16384 and scaled["setup"]["timing"]["iteration_s"] == 7.5
    assert scaled["policies"]["sparse"]["samples"] == 1024 * small["samples"]


def test_policies_come_back_as_the_program_does(capsys, tmp_path):
    calm = [{"type": "iteration", "time": n, "iteration": n, "elapsed_s": 1.0} for n in range(20)]
    lost = [{"type": "inject", "time": 20.0, "action": "kill"}, {"type": "resume", "time": 23.5, "seconds": 0.5}]
    back = [{"type": "start", "time": 24.0, "world_size": 4}, calm[0] | {"time": 26.0, "iteration": 20}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*calm, *lost, *back]))
    fast = [*SMALL, "--profile", str(tmp_path), "--policy", "full,sparse", "--mtbf", "30m"]
    papers, program = (told(capsys, *fast, "--ways", ways)["policies"] for ways in ("papers", "program"))
    for name in ("full", "sparse"):
        assert program[name]["recovery_each_s"] < papers[name]["recovery_each_s"]
    assert program["full"]["recovery_each_s"] > 5.0  # 3 s until all are connected, and so on, and what is replayed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster", "b200:8"], "there is no cluster 'b200'"),
        (["--pp", "3"], "not a multiple of tp x pp"),
        (["--policy", "sparze"], "there is no policy 'sparze'"),
        (["--trace", "nowhere.txt"], "nowhere.txt"),
        (["--trace", "t", "--mtbf", "1h"], "drop --mtbf"),
        (["--trace", os.devnull], "is empty"),
        (["--scale-to", "16384"], "write gpus=16384"),
        (["--ways", "program"], "give --profile one in which workers were lost"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--snapshot-overhead", "-1"], "give a share from 0"),
        (["--policy", "auto", "--host-memory-gb", "1e-9"], "no policy keeps to all limits"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_one_sentence(capsys, flags, message):
    assert simulate.main([*SMALL, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("simulate: ") and message in error and error.count("\n") == 1


def test_a_trace_without_a_loss(capsys, tmp_path):
    (tmp_path / "gcp.txt").write_text(TRACE.splitlines(keepends=True)[0])
    assert simulate.main([*SMALL, "--trace", str(tmp_path / "gcp.txt")]) == 1
    assert "nothing is lost in this trace" in capsys.readouterr().err


def test_durations():
    assert [simulate.duration(text) for text in ("90", "90s", "10m", "2h", "0.5d")] == [90, 90, 600, 7200, 43200]
    for wrong in ("", "m", "-1h", "soon"):
        with pytest.raises(simulate.argparse.ArgumentTypeError, match="is no duration"):
            simulate.duration(wrong)


def test_the_global_batch_has_megatron_s_flag(capsys):
    both = [told(capsys, *DEEPSEEK, flag, "1024") for flag in ("--global-batch-size", "--global-batch")]
    assert both[0] == both[1] != told(capsys, *DEEPSEEK)
