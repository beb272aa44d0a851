#!/usr/bin/env python3
"""The benchmark `forward_performance`, by its published name."""

if __name__ == "__main__":
    import bench

    bench.start("forward_performance")
