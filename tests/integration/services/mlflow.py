"""A service in the place of MLflow, which appends what it gets to the file ``MLFLOW_TRACKING_URI``."""

import json
import os


def _record(*call):
    with open(os.environ["MLFLOW_TRACKING_URI"], "a") as file:
        file.write(json.dumps(call) + "\n")


def set_experiment(name):
    """Records the name."""
    _record("experiment", name)


def search_runs(**query):
    """Finds no earlier run."""
    return []


def start_run(**options):
    """Records the run."""
    _record("run", options)


def log_metrics(values, step):
    """Records values."""
    _record("metrics", values, step)


def set_tag(name, text):
    """Records a tag."""
    _record("tag", name, text)


def end_run():
    """Records the end."""
    _record("end")
