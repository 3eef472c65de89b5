"""Which policy is in force with ``--ckpt-policy auto``: by what is measured alone, and as it was for who goes on."""

from megatron.pretraining.process import cpu
from tests.errors import raises

cpu.install()

import json  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.pretraining.session import auto_policy, in_force, lasting  # noqa: E402
from moc.events import EventLog  # noqa: E402
from moc.policy import ObservedIteration, Transfer  # noqa: E402
from moc.policy.interval import BLOCK, WARM_UP  # noqa: E402
from moc.runtime import environment  # noqa: E402
from moc.session import auto  # noqa: E402
from moc.session.auto import DRIFT, HOLDS, changed  # noqa: E402
from moc.session.resume.survivors import LiveState, LocalRemains  # noqa: E402
from moc.session.settings import SettingsError  # noqa: E402
from moc.session.tiers import Tiers  # noqa: E402
from moc.simulate.live_costs import every_candidate, flags_of_candidate  # noqa: E402
from moc.simulate.planner import PlanLimits  # noqa: E402
from moc.state.operators import Detail  # noqa: E402
from moc.state.record import Position  # noqa: E402
from moc.store.storage import LocalStorage  # noqa: E402
from moc.store.store import Store  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.configs import config_of  # noqa: E402
from tests.model_shape import ModelShape, model_operators  # noqa: E402

MODEL = dict(num_layers=2, hidden_size=8, num_attention_heads=2, num_experts=8, moe_ffn_hidden_size=64, seq_length=8)
TRAINING = dict(micro_batch_size=1, train_iters=1, lr=1.0, mock_data=True, tokenizer_type="NullTokenizer")
AUTO = dict(ckpt_policy="auto", save="nowhere", vocab_size=10, max_position_embeddings=8, add_bias_linear=False)
SHAPE = ModelShape((1, 1), 8, 32, 8, 8, 4, 10, 8, 8, 64, linear_bias=False)
FREE = PlanLimits(plt=1.0, policies=("selective",), replicas=(1,))
BYTES = {Detail.FULL: 12, Detail.MASTER: 4, Detail.COMPUTE: 2}


class Log:
    """What is said, and events as they are."""

    def __init__(self, directory):
        self.lines, self.events = [], EventLog(directory)
        self.message = self.lines.append


@pytest.fixture(scope="module", autouse=True)
def world():
    """One worker, that can ask itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """One that measures what it is told."""

    def __init__(self, directory, state=None, nodes=("a",), may_replay=True, **flags):
        self.config = config_of(MODEL | TRAINING | AUTO | flags)
        self.log = Log(directory)
        self.auto, self.iteration = auto_policy(self.config, self.log), 0
        left = (
            None if state is None else LocalRemains(live=LiveState(Position(), {"auto": json.loads(json.dumps(state))}))
        )
        self._tiers = Tiers(Store(LocalStorage(directory)), None, nodes, True, (0,), None, 2)
        self.in_force = in_force(self.config, self.auto._chosen(self._tiers, left, is_first=True)).snapshot
        operators = model_operators(SHAPE)
        parameters = {operator.name: operator.parameters for operator in operators}
        self.full = 12.0 * sum(parameters.values())

        def busiest(plan):
            return sum(BYTES[detail] * parameters[name] for name, detail in plan.items())

        self.auto.on_sizes(busiest, SimpleNamespace(operators=operators, stages=(0, 0)), lambda: may_replay)

    def train(self, iterations, iteration_s=1.0, copy_s=2.0, write_s=4.0, load=None):
        """Whether, and when, it began again under another policy; times are those of a snapshot of everything."""
        for _ in range(iterations):
            self.iteration += 1
            moved = {"copied": copy_s, "written": write_s, "replicated": copy_s}
            seen = {name: Transfer(self.full, seconds) for name, seconds in moved.items()}
            self.auto.observe(ObservedIteration(iteration_s, forward_backward_s=0.9 * iteration_s, **seen))
            if self.auto.switches_policy(self.iteration, load):
                return self.iteration
        return None

    @property
    def flags(self):
        return self.auto.state_dict()["flags"]


def test_auto_measures_then_chooses_and_logs_reason(tmp_path):
    run = Run(tmp_path, exact_only=True, mtbf_hours=1)
    assert (run.in_force.ckpt_policy, run.in_force.snapshot_interval) == ("full", "auto")
    assert run.train(BLOCK + WARM_UP + 5) == BLOCK + WARM_UP
    again = Run(tmp_path, run.auto.state_dict(), exact_only=True, mtbf_hours=1)
    assert again.in_force.ckpt_policy == run.flags["ckpt_policy"] in ("full", "sparse")
    (line,) = run.log.lines
    assert "since it has measured" in line and "The next best" in line
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert event["type"] == "choice" and event["reason"] in line and len(event["ettr"]) == 2


def test_failed_choice_does_not_end_training(tmp_path, monkeypatch):
    run = Run(tmp_path, mtbf_hours=1)
    monkeypatch.setattr(auto, "every_candidate", lambda *_: {}[12])
    assert run.train(4 * BLOCK) is None and run.flags == {}
    (line,) = run.log.lines
    assert "KeyError: 12" in line
    run.auto.observe(None)
    assert run.train(1) is None


def test_equal_measurements_give_equal_choices(tmp_path):
    one, other = (Run(tmp_path / name, mtbf_hours=1) for name in "ab")
    one.train(40), other.train(40)
    assert one.auto.state_dict() == other.auto.state_dict() and one.flags


def test_choice_holds_until_measurements_change(tmp_path):
    first = Run(tmp_path, mtbf_hours=1, exact_only=True)
    first.train(40, copy_s=0.5, write_s=0.4)
    run = Run(tmp_path, first.auto.state_dict(), mtbf_hours=1, exact_only=True)
    run.iteration = first.iteration
    assert run.flags == {"ckpt_policy": "full", "snapshot_interval": "1"}
    assert run.train(3 * HOLDS, copy_s=0.5, write_s=0.4) is None and not run.log.lines
    begun = run.iteration
    assert begun < run.train(2 * HOLDS, copy_s=5.0, write_s=0.4) < begun + HOLDS
    assert "copy_rate is" in run.log.lines[0] and run.flags != {"ckpt_policy": "full", "snapshot_interval": "1"}


def test_choice_is_not_reevaluated_before_hold_ends(tmp_path):
    first = Run(tmp_path, mtbf_hours=1, exact_only=True)
    chosen = first.train(40, copy_s=0.5, write_s=0.4)
    run = Run(tmp_path, first.auto.state_dict(), mtbf_hours=1, exact_only=True)
    run.iteration = chosen
    assert run.train(2 * HOLDS, copy_s=5.0, write_s=0.4) == chosen + HOLDS


def test_popular_experts_are_saved_first(tmp_path):
    """Fewer tokens are lost than in turn, at the same cost."""
    busy = {0: [900, 90, 9, 1, 1, 1, 1, 1], 1: [1, 1, 1, 1, 1, 9, 90, 900]}
    for load, policy in ((None, "pec"), (busy, "selective")):
        run = Run(tmp_path / policy, mtbf_hours=0.1, ckpt_tier="memory")
        assert run.train(40, load=load) and run.flags["ckpt_policy"] == policy
        exact = Run(tmp_path / f"{policy}-exact", mtbf_hours=0.1, ckpt_tier="memory", exact_only=True)
        assert exact.train(40, load=load) and exact.flags["ckpt_policy"] in ("full", "sparse")


def test_pec_k_auto_chooses_k_only_and_keeps_other_flags(tmp_path):
    asked = dict(ckpt_policy="pec", pec_k="auto", pec_selection="load_aware", mtbf_hours=1)
    run = Run(tmp_path, **asked, snapshot_interval="7", pec_plt_limit=1.0)
    assert (run.in_force.ckpt_policy, run.in_force.pec_k, run.in_force.snapshot_interval) == ("pec", "1", "7")
    assert run.train(40, copy_s=0.1, write_s=0.1)  # full snapshots would cost nothing
    again = Run(tmp_path, run.auto.state_dict(), **asked, snapshot_interval="7", pec_plt_limit=1.0).in_force
    assert (again.ckpt_policy, again.snapshot_interval, again.pec_selection) == ("pec", "7", "load_aware")
    assert 1 <= int(again.pec_k) < 8 and again.mtbf_hours is None
    free = Run(tmp_path, run.auto.state_dict(), **asked)  # the choice was made for another interval
    assert free.in_force.snapshot_interval == "auto" and free.train(1) == 1
    in_memory = Run(tmp_path, **asked, ckpt_tier="memory").in_force
    assert (in_memory.ckpt_policy, in_memory.pec_k, in_memory.persist_interval) == ("pec", "1", 1)


def test_gradients_are_considered_where_job_can_save_them(tmp_path):
    """By their bytes, a third; ``auto`` says itself whether they are saved."""
    peers, loads = dict(ckpt_tier="peers", nodes=("a", "b")), {0: [900, 90, 9, 1, 1, 1, 1, 1]}
    for flags, gradient in ((peers, 1 / 3), (peers | dict(optimizer="sgd"), None), (dict(ckpt_tier="disk"), None)):
        run = Run(tmp_path / str(len(flags)) / flags["ckpt_tier"], **flags)
        assert run.auto._saved().gradient == gradient
        rates = dict(iteration_s=1.0, forward_backward_s=0.9, copy_rate=run.full, write_rate=run.full)
        every = every_candidate(run.auto._running(rates | dict(replicate_rate=100 * run.full), loads), 60.0, FREE)
        told = {flags_of_candidate(one).get("selective_gradients") for one in every}
        assert told == ({"off"} if gradient is None else {"off", None})
    with raises("flag-chosen-by-auto", "--selective-gradients"):
        Run(tmp_path, selective_gradients="off", **peers)


def test_small_gain_does_not_switch_policy(tmp_path):
    first = Run(tmp_path, mtbf_hours=1, exact_only=True)
    first.train(40, copy_s=0.1, write_s=0.1)
    run = Run(tmp_path, first.auto.state_dict(), mtbf_hours=1, exact_only=True)
    run.iteration = first.iteration
    assert run.train(2 * HOLDS, copy_s=0.1, write_s=0.1 * DRIFT) is None and run.flags == first.flags
    assert "stays in force" in run.log.lines[0]


def test_faults_are_counted_but_not_regular_ends(tmp_path):
    run = Run(tmp_path)
    run.train(WARM_UP)
    state = run.auto.state_dict()
    assert [Run(tmp_path, state).auto.state_dict()["measured"]["faults"] for _ in "ab"] == [1, 1]
    run.auto.mark_orderly_end()
    assert Run(tmp_path, run.auto.state_dict()).auto.state_dict()["measured"]["faults"] == 0
    run = Run(tmp_path)
    assert run.train(40)
    run.auto.mark_orderly_end()  # a switch is none either
    again = Run(tmp_path, run.auto.state_dict())
    assert again.auto.state_dict()["measured"]["faults"] == 0
    for _ in range(4):
        again = Run(tmp_path, again.auto.state_dict())
    again.iteration = run.iteration
    again.train(2 * HOLDS)
    assert "mtbf_s is" in again.log.lines[0]


@each_row("other", [dict(exact_only=True), dict(mtbf_hours=2), dict(ckpt_tier="memory")], ids=str)
def test_other_limits_give_new_choice_from_known_measurements(other, tmp_path):
    run = Run(tmp_path, mtbf_hours=1)
    run.train(40)
    again = Run(tmp_path, run.auto.state_dict(), **dict(mtbf_hours=1) | other)
    assert again.in_force.ckpt_policy == "full" and again.in_force.snapshot_interval == "auto"
    assert again.train(1) == 1


@each_row("other", [dict(nodes=("a", "b")), dict(expert_model_parallel_size=2)], ids=str)
def test_other_nodes_or_layout_are_measured_again(other, tmp_path):
    run = Run(tmp_path, mtbf_hours=1)
    run.train(40)
    again = Run(tmp_path, run.auto.state_dict(), mtbf_hours=1, **other)
    assert again.in_force.snapshot_interval == "auto"
    known = again.auto.state_dict()["measured"]
    assert (known["trained_s"], known["faults"]) == (run.iteration, 1)
    assert again.train(40) == BLOCK + WARM_UP


def test_uninstalled_policy_is_not_in_force(tmp_path):
    run = Run(tmp_path, mtbf_hours=1)
    run.train(40)
    gone = run.auto.state_dict() | {"flags": {"ckpt_policy": "busier", "busier_experts": 1}}
    again = Run(tmp_path, gone, mtbf_hours=1)
    assert again.in_force.snapshot_interval == "auto" and again.train(1) == 1


@pytest.mark.parametrize("empty", [{}, [], "", 0, None], ids=repr)
def test_empty_state_of_snapshot_counts_as_none(empty):
    """The check of a manifest accepts it, so the choice of a policy does, too."""
    manifest = SimpleNamespace(state={"auto": empty})
    store = SimpleNamespace(iterations=lambda: [3], read_manifest=lambda iteration: manifest)
    assert auto._newest_in(store) == (3, None)


def test_flags_of_unchosen_policies_have_no_effect(tmp_path):
    wanted = dict(pec_selection="load_aware", sparse_order="index", pec_plt_limit=0.5, host_memory_gb=1.0)
    run = Run(tmp_path, mtbf_hours=0.1, exact_only=True, **wanted)
    assert run.in_force.pec_selection == "sequential" and run.in_force.host_memory_gb is None
    assert run.train(40, copy_s=4.0, write_s=1.0), run.log.lines
    again = Run(tmp_path, run.auto.state_dict(), mtbf_hours=0.1, exact_only=True, **wanted).in_force
    assert (again.ckpt_policy, again.sparse_order) == ("sparse", "index"), run.log.lines


def test_policy_without_possible_recovery_is_not_chosen(tmp_path):
    chosen = []
    for may_replay in (True, False):
        run = Run(tmp_path, mtbf_hours=0.1, exact_only=True, ckpt_tier="memory", may_replay=may_replay)
        run.train(40, copy_s=4.0, write_s=1.0)
        chosen.append(run.flags)
    assert [flags["ckpt_policy"] for flags in chosen] == ["sparse", "full"]
    assert min(flags["persist_interval"] for flags in chosen) >= 1


def test_excess_host_memory_is_refused_at_start(tmp_path):
    peers = dict(ckpt_tier="peers", nodes=("a", "b", "c"))
    full = Run(tmp_path).full
    run = Run(tmp_path, mtbf_hours=1, host_memory_gb=8.1 * full / 1e9, **peers)  # four buffers, and four copies
    assert run.in_force.replicas == 1
    run.train(40)
    assert run.flags["replicas"] == 1
    run = Run(tmp_path, mtbf_hours=1, **peers)
    run.train(40, copy_s=0.1)
    assert run.flags["replicas"] == 2
    with pytest.raises(SettingsError, match="--host-memory-gb .*--ckpt-tier peers"):
        Run(tmp_path, host_memory_gb=6.9 * full / 1e9, **peers)


def test_change_is_factor_of_two_or_new_measurement():
    before = {"iteration_s": 1.0, "copy_rate": 4e9}
    assert changed(before, {"iteration_s": 1.9, "copy_rate": 2.1e9}) is None
    assert changed(before, {"iteration_s": 1.0, "copy_rate": 2e9}) == "copy_rate is 2e+09 now, and was 4e+09"
    assert changed(before, {"iteration_s": 2.0, "copy_rate": 4e9}).startswith("iteration_s is 2 now")
    assert changed(before, before | {"write_rate": 1.0}) == "write_rate is 1 now, and was not known"


TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)


@each_row(
    ("per_node", "stages", "more", "ranks", "parts"),
    [
        (2, 1, {}, 2, ((0, 1, 2, 3),)),
        (2, 2, {}, 1, ((0, 1, 2, 3),)),  # both stages are on each node
        (1, 2, {}, 1, ((0, 1), (2, 3))),
        (2, 4, {}, 1, ((0, 1), (2, 3))),
        (2, 2, TP2, 2, ((0, 1), (2, 3))),
        (1, 2, dict(moe_layer_freq="[0,0,0,1]"), 1, ((), (3,))),
    ],
)
def test_survival_counts_holders_of_each_model_part(monkeypatch, per_node, stages, more, ranks, parts):
    elastic = dict(elastic=True, elastic_slots=4, calculate_per_token_loss=True, global_batch_size=48, ckpt_dir="there")
    flags = MODEL | TRAINING | AUTO | elastic | dict(num_layers=4, pipeline_model_parallel_size=stages) | more
    places = {environment.MIN_NODES: 4, environment.MAX_NODES: 8, "LOCAL_WORLD_SIZE": per_node}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    config = config_of(flags, workers=2 * stages * more.get("tensor_model_parallel_size", 1))
    found = lasting(config)
    assert (found.least, found.most, found.ranks, found.parts) == (4, 8, ranks, parts)
    assert all(0.0 <= chance <= 1.0 for chance in found.survivals())
    monkeypatch.setenv(environment.MIN_NODES, "8")
    assert lasting(config) is None
