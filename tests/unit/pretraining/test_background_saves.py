"""``--async-save`` needs no persistent process of Megatron-LM, and starts none."""

from megatron.pretraining.entry.offline import config_of_words
from tests.cases import each_row
from tests.unit.pretraining.flags import BASE


@each_row("worker", ["", "--use-persistent-ckpt-worker"])
def test_saves_overlap_with_and_without_persistent_worker(worker, monkeypatch):
    import moc.megatron  # noqa: F401 -- before Megatron-LM's modules
    from megatron.pretraining.entry import configuration

    config_of, given = configuration.config_of, []
    monkeypatch.setattr(configuration, "config_of", lambda args, own: given.append(args) or config_of(args, own))
    config = config_of_words(f"{BASE} --save x --async-save {worker}".split(), 1)
    assert config.checkpoint.async_save and not given[-1].use_persistent_ckpt_worker
