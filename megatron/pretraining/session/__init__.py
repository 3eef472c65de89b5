"""Connects the training session (:mod:`moc.session`) to the flags."""
