#!/usr/bin/env python3
"""The benchmark `backward_equivalence`, by its published name."""

if __name__ == "__main__":
    import bench

    bench.start("backward_equivalence")
