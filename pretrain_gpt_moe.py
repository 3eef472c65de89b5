"""Pre-trains a GPT language model with a mixture of experts; ``--help`` lists the flags.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --model tiny --mock-data ...

The program is ``megatron.pretraining.pretrain_gpt_moe``, which is ``moc-pretrain`` where the package is installed.
"""

import sys

from megatron.pretraining.pretrain_gpt_moe import check_arguments, main, warm_up  # noqa: F401  (launchers call them)

if __name__ == "__main__":
    sys.exit(main())
