"""ranks.py FOLDER: serves requests with two ranks, and prints the tokens of each in a line."""

from __future__ import annotations

import sys
from pathlib import Path

from serving import make_engine, make_prompts, serve

if __name__ == "__main__":
    engine = make_engine(Path(sys.argv[1]), tensor_parallel_size=2)
    for tokens in serve(engine, make_prompts(6)):
        print(*tokens)
