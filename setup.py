"""Which packages there are; everything else stands in pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(
    # `megatron` is a namespace shared with pip's megatron-core: it has no __init__.py, here or there.
    packages=find_namespace_packages(
        include=["megatron.pretraining*", "moc*"], exclude=["megatron.pretraining.examples.files*"]
    ),
    # Naming the root makes `pip install -e .` a plain path entry, under which both halves of the
    # namespace are found; setuptools' import hooks for editable installs stay out of the way.
    package_dir={"": "."},
    package_data={
        "moc": ["py.typed"],
        "megatron.pretraining": ["py.typed", "presets/*.yaml"],
        # Links to files of the repository, which moc-examples copies.
        "megatron.pretraining.examples": [
            *(f"files/{name}" for name in ("pretrain_gpt_moe.py", "examples/*.*", "tools/*.py")),
            *(f"files/scripts/{name}" for name in ("common.sh", "quickstart.sh", "torchrun.py", "train.sh")),
            *("files/scripts/recipes/*", "files/scripts/slurm/*"),
        ],
    },
)
