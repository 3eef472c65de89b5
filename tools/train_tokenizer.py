#!/usr/bin/env python3
"""Trains a SentencePiece tokenizer that gives every text back as it was."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from megatron.pretraining.data.tokenizer_training import main

if __name__ == "__main__":
    sys.exit(main())
