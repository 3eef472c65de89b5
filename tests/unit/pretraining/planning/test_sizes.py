"""The table of MoC's setting: our reductions are at least the paper's, close to what no rule can beat."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest

from megatron.pretraining.planning import sizes
from tests.cases import each_row
from tests.unit.conftest import REPOSITORY

WHOLE_SAVING = {1: 12, 2: 12, 3: 28}  # percent; section 6.2.1 gives the range, 12 to 28
PEC = {1: 22, 2: 22, 3: 29}  # of 22 to 29


def plan(capsys, *argv) -> dict:
    assert sizes.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows(capsys, *argv) -> dict:
    return {row["k"]: row for row in plan(capsys, *argv)["rows"]}


@each_row("case", [1, 2, 3])
def test_reductions_are_at_least_those_of_paper(capsys, case):
    table = rows(capsys, "--case", str(case))
    assert list(table) == [*range(1, 17), None]
    assert table[None]["reduction_percent"]["EE+EN"] >= WHOLE_SAVING[case]
    for checkpoint in range(0, 16, 3):  # some of a rotation
        first = rows(capsys, "--case", str(case), "--checkpoint", str(checkpoint))[1]
        assert first["reduction_percent"]["EE+EN"] >= PEC[case]
        assert 1 - first["bottleneck"]["EE+AN"] / first["bottleneck"]["EE+EN"] >= 0.061


@each_row("case", [1, 2, 3])
@each_row("more", [[], ["--keep-master"], ["--checkpoint", "5"], ["--no-zero"]], ids=str)
def test_bottleneck_is_within_3_percent_of_bound(capsys, case, more):
    for row in rows(capsys, "--case", str(case), *more).values():
        assert 0 <= row["over_percent"] < 3


def test_equal_expert_sharding_needs_several_ep_groups(capsys):
    for case, helps in ((1, False), (2, False), (3, True)):
        row = rows(capsys, "--case", str(case))[None]
        assert (row["reduction_percent"]["EE"] > 0) == helps


@pytest.mark.slow
def test_new_sharding_rule_needs_one_file(tmp_path):
    """The example of docs/how-to/own-sharding-rule.md, word by word."""
    text = (REPOSITORY / "docs" / "how-to" / "own-sharding-rule.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    for name in ("moc", "megatron", "tools"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "moc" / "sharding" / "rules" / "rotating.py").write_text(example)
    argv = [tmp_path / "tools" / "plan_checkpoint.py", "--case", "3", "--others", "rotating"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    assert done.returncode == 0 and "equal+rotating" in done.stdout, done.stderr


def test_volumes_match_those_of_paper(capsys):
    """Figure 2's shares, and the 42 % and 0.42 of Figure 10(a) and Table 3, which keep all master weights."""
    facts = plan(capsys, "--case", "1")
    count = facts["parameters"]
    both = count["experts"] + count["others"]
    shares = [100 * count[kind] * size / both / 14 for size in (2, 12) for kind in ("experts", "others")]
    assert [round(share) for share in shares] == [12, 2, 74, 12]
    kept = rows(capsys, "--case", "1", "--keep-master")
    assert kept[1]["total"] / kept[None]["total"] == pytest.approx(0.423, abs=0.002)


def test_embedding_is_bottleneck_if_layers_are_not_split(capsys):
    whole = rows(capsys, "--case", "2", "--whole")[None]
    assert whole["over_percent"] > 3


def test_rank_sizes_add_up_for_one_k(capsys):
    result = plan(capsys, "--model", "gpt-350m-16e", "--world", "16", "--ep", "8", "--pec-k", "1")
    row = result["rows"][0]
    assert {name: max(sizes) for name, sizes in result["ranks"].items()} == row["bottleneck"]
    assert all(sum(sizes) == row["total"] for sizes in result["ranks"].values())


def test_any_model_and_layout_are_planned(capsys):
    argv = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
    argv += ["--num-experts", "8", "--disable-bias-linear", "--vocab-size", "1000"]
    facts = plan(capsys, *argv, "--world", "16", "--tp", "2", "--pp", "2", "--ep", "2")
    assert facts["layout"] | {"dp": 4, "expert_dp": 2} == facts["layout"]
    assert facts["rows"][-1]["total"] == 14 * sum(facts["parameters"].values())
    dense = plan(capsys, *argv[:8], "--vocab-size", "1000", "--world", "4", "--fp32")
    assert [row["k"] for row in dense["rows"]] == [None]
    assert dense["rows"][0]["total"] == 12 * dense["parameters"]["others"]


def test_sharding_rule_is_selectable(capsys):
    assert sizes.main(["--case", "3", "--others", "baseline"]) == 0
    assert "equal+baseline" in capsys.readouterr().out
    assert sizes.main(["--case", "3", "--experts", "baseline"]) == 0
    assert "baseline+adaptive" in capsys.readouterr().out


def test_table_shows_layout_and_sizes(capsys):
    assert sizes.main(["--case", "3", "--pec-k", "1"]) == 0
    text = capsys.readouterr().out
    assert "16 ranks: DP 16, TP 1, PP 1, EP 8 in 2 groups" in text
    assert "2,313.9" in text and "unequal" in text
    assert text.count("\n") > 16 + 16


@each_row(
    "argv, sentence",
    [
        (["--case", "1", "--ep", "2"], "drop --world and --ep"),
        (["--model", "tiny", "--pec-k", "9"], "--pec-k is 9"),
        (["--model", "tiny", "--world", "6", "--ep", "4"], "6 ranks are not a multiple of expert_tp x ep x pp = 4"),
        (["--model", "tiny", "--others", "fair"], "choose one of adaptive, baseline, equal"),
        (["--model", "tiny", "--fp32", "--keep-master"], "[flag-has-no-effect]"),
        (["--model", "tiny", "--checkpoint", "-1"], "--checkpoint is -1"),
        (
            ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "4"],
            "--vocab-size",
        ),
    ],
)
def test_invalid_plan_arguments_are_refused_in_one_line(capsys, argv, sentence):
    assert sizes.main(argv) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


EXPLAIN = (
    "--case 1 --explain-k --forward-backward-s 1.2 --iteration-s 1.5 --snapshot-gbs 1 --persist-gbs 0.1 --mtbf-hours 24"
).split()


def test_pec_k_is_chosen_within_plt_limit(capsys):
    policy = plan(capsys, *EXPLAIN, "--restart-s", "120")["policy"]  # an old flag, which has no effect
    (best,) = policy["policies"]
    assert best.startswith("pec, K ") and policy["flags"]["ckpt_policy"] == "pec"
    assert policy == plan(capsys, *EXPLAIN)["policy"]
    limited = plan(capsys, *EXPLAIN, "--plt-limit", "0.0001")["policy"]["policies"]
    assert max(found["plt"] for found in limited.values()) <= 0.0001 < policy["policies"][best]["plt"]
    assert plan(capsys, "--case", "1")["policy"] is None


def test_documented_choice_is_printed(capsys):
    page = (REPOSITORY / "docs" / "explanation" / "moc_system.md").read_text(encoding="utf-8")
    command, said = page.split("    python tools/plan_checkpoint.py ")[1].split("\n\nprints, among others\n\n")
    assert sizes.main(command.replace("\\\n", " ").split()) == 0
    choice = "\n\n".join(capsys.readouterr().out.rstrip().split("\n\n")[-3:])
    assert said.startswith(textwrap.indent(choice, "    ") + "\n\n")


MEASURED = "--iteration-s 1.5 --forward-backward-s 1.2 --snapshot-gbs 1 --persist-gbs 0.1 --mtbf-hours 1".split()
EXPLAIN_POLICY = ["--model", "gpt-350m-16e", "--world", "16", "--ep", "8", "--explain-policy"]


def test_policy_is_chosen_and_explained(capsys):
    policy = plan(capsys, *EXPLAIN_POLICY, *MEASURED)["policy"]
    best, *others = policy["policies"]
    assert best.startswith("pec") and policy["flags"].items() >= {"ckpt_policy": "pec", "ckpt_tier": "disk"}.items()
    most = max(policy["policies"][other]["ettr"] for other in others)
    assert policy["policies"][best]["ettr"] >= most - 0.001  # within a tenth of a point, fewer lost tokens win
    assert 0 < policy["policies"][best]["plt"] <= 0.0375 and policy["reason"].startswith(best)
    exact = plan(capsys, *EXPLAIN_POLICY, *MEASURED, "--exact-only")["policy"]
    assert exact["flags"]["ckpt_policy"] in ("full", "sparse") and not any("pec" in name for name in exact["policies"])
    assert sizes.main([*EXPLAIN_POLICY, *MEASURED]) == 0
    said = capsys.readouterr().out
    assert f"\n{best}: ETTR " in said and "--ckpt-policy pec --snapshot-interval " in said
    assert plan(capsys, "--case", "1")["policy"] is None


def test_cluster_sheet_supplies_unmeasured_rates(capsys):
    peers = [*EXPLAIN_POLICY, "--cluster", "a100-80gb", "--tier", "peers", "--mtbf-hours", "1", "--exact-only"]
    free = plan(capsys, *peers, "--global-batch", "64", "--micro-batch", "8")["policy"]
    assert free["flags"]["replicas"] == 1  # two nodes of eight
    least = min(found["host_bytes"] for found in free["policies"].values()) / 1e9
    argv = [*peers, "--iteration-s", "2", "--host-memory-gb"]
    assert plan(capsys, *argv, str(1.01 * least))["policy"]["flags"]["replicas"] == 1
    assert sizes.main([*argv, str(0.1 * least)]) == 1
    assert "no policy keeps to all limits" in capsys.readouterr().err


DENSE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100".split()


@each_row(
    ("argv", "sentence"),
    [
        (EXPLAIN[:-2], "[flag-needs-another]"),
        ([*EXPLAIN[:-1], "0"], "[flag-needs-another]"),
        ([*EXPLAIN, "--iteration-s", "0"], "[value-out-of-range]"),
        ([*DENSE, *EXPLAIN[2:]], "[model-without-experts]"),
        ([*EXPLAIN_POLICY, *MEASURED[:-2]], "--explain-policy needs --mtbf-hours, above 0"),
        (
            [*EXPLAIN_POLICY, *MEASURED[2:]],
            "needs --iteration-s",
        ),
        ([*EXPLAIN_POLICY, *MEASURED, "--tier", "peers"], "--explain-policy needs --replicate-gbs, or a --cluster"),
        ([*EXPLAIN_POLICY, *MEASURED, "--nodes", "17"], "--nodes is 17"),
        ([*EXPLAIN_POLICY, *MEASURED, "--nodes", "0"], "--nodes is 0"),
        ([*EXPLAIN_POLICY, *MEASURED, "--persist-gbs", "0"], "write_rate cannot be 0.0"),
        ([*EXPLAIN_POLICY, *MEASURED, "--replicas", "2"], "--replicas is 2"),
    ],
)
def test_invalid_explain_arguments_are_refused(capsys, argv, sentence):
    assert sizes.main(argv) == 1
    assert sentence in capsys.readouterr().err
