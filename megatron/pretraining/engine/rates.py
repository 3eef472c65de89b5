"""Schedules learning rate and weight decay with megatron-core, storing each setting only once."""

from __future__ import annotations

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_LIMITS = ("max_lr", "min_lr")
_NOT_IN_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


class RateSchedule(OptimizerParamScheduler):
    """megatron-core's schedule, which saves all its settings and applies all that it loads.

    megatron-core also keeps the limits of the learning rate in the parameter groups, where loading does not change
    them.  The other limits of groups with a decoupled learning rate are kept.  megatron-core neither saves nor compares
    the start of the warm-up and the last phase of WSD.  It sets the groups' weight decay before it loads the schedule
    of the weight decay.
    """

    def state_dict(self) -> dict:
        """Returns the settings and the number of samples."""
        return super().state_dict() | {name: getattr(self, name) for name in _NOT_IN_STATE}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the settings or, with ``--override-opt-param-scheduler``, only the number of samples.

        Raises:
            AssertionError: the settings differ, and no flag states which ones apply.
        """
        for name in _NOT_IN_STATE:
            here, there = getattr(self, name), state_dict.get(name, getattr(self, name))
            if self.use_checkpoint_opt_param_scheduler:
                setattr(self, name, there)
            elif not self.override_opt_param_scheduler:
                assert here == there, f"{name} is {here} and not {there}"
        before = {limit: getattr(self, limit) for limit in _LIMITS}
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            same = [limit for limit in _LIMITS if group.get(limit) == before[limit]]
            group.update({limit: getattr(self, limit) for limit in same})
        self.step(0)
