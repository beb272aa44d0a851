"""The tables of the original's README: its own measurements, for forward_performance --original and
backward_performance --original.

Source: https://github.com/SmallDoges/flash-dmattn, README.md at commit a60de65 (v1.0.0). Measured
on an NVIDIA A100-SXM4-80GB, in bfloat16, for one sequence, 2 query heads, 1 kv head and head_dim
128. SDPA gets the causal mask as a tensor added to logits; FDMA gets a mask and a bias of every
pair.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A row of the original's tables."""

    q_len: int
    kv_len: int
    window: int
    sdpa_ms: float
    fdma_ms: float
    times: float  # its speed-up, rounded after division


FORWARD = (
    Published(256, 256, 1024, 0.29, 0.19, 1.58),
    Published(512, 512, 1024, 0.35, 0.19, 1.86),
    Published(1024, 1024, 1024, 0.51, 0.18, 2.81),
    Published(2048, 2048, 1024, 1.04, 0.18, 5.68),
    Published(4096, 4096, 1024, 2.53, 0.24, 10.41),
    Published(8192, 8192, 1024, 9.38, 0.36, 25.93),
    Published(16384, 16384, 1024, 28.39, 0.81, 35.25),
    Published(32768, 32768, 1024, 111.87, 2.25, 49.78),
    Published(32768, 32768, 32, 113.19, 2.10, 53.97),
    Published(32768, 32768, 64, 113.17, 2.12, 53.32),
    Published(32768, 32768, 128, 113.14, 2.10, 53.78),
    Published(32768, 32768, 256, 113.18, 2.13, 53.18),
    Published(32768, 32768, 512, 113.19, 2.17, 52.17),
    Published(32768, 32768, 1024, 113.19, 2.24, 50.45),
    Published(32768, 32768, 2048, 113.15, 2.39, 47.35),
    Published(32768, 32768, 4096, 113.16, 2.67, 42.39),
    Published(32768, 32768, 8192, 113.11, 3.20, 35.29),
    Published(32768, 32768, 16384, 113.15, 3.97, 28.51),
    Published(32768, 32768, 32768, 113.11, 4.90, 23.10),
    Published(1, 256, 1024, 0.25, 0.19, 1.28),
    Published(1, 512, 1024, 0.25, 0.19, 1.27),
    Published(1, 1024, 1024, 0.25, 0.20, 1.28),
    Published(1, 2048, 1024, 0.25, 0.20, 1.24),
    Published(1, 4096, 1024, 0.25, 0.19, 1.29),
    Published(1, 8192, 1024, 0.25, 0.20, 1.25),
    Published(1, 16384, 1024, 0.25, 0.19, 1.29),
    Published(1, 32768, 1024, 0.27, 0.20, 1.33),
    Published(1, 65536, 1024, 0.42, 0.20, 2.10),
    Published(1, 131072, 1024, 0.72, 0.20, 3.65),
    Published(1, 262144, 1024, 1.31, 0.22, 6.06),
    Published(1, 524288, 1024, 2.49, 0.24, 10.45),
    Published(1, 524288, 32, 2.48, 0.21, 11.60),
    Published(1, 524288, 64, 2.44, 0.21, 11.66),
    Published(1, 524288, 128, 2.45, 0.21, 11.47),
    Published(1, 524288, 256, 2.43, 0.21, 11.47),
    Published(1, 524288, 512, 2.44, 0.22, 10.89),
    Published(1, 524288, 1024, 2.44, 0.24, 10.31),
    Published(1, 524288, 2048, 2.44, 0.27, 9.07),
    Published(1, 524288, 4096, 2.45, 0.33, 7.41),
    Published(1, 524288, 8192, 2.44, 0.35, 6.93),
    Published(1, 524288, 16384, 2.44, 0.35, 6.93),
    Published(1, 524288, 32768, 2.45, 0.35, 6.96),
    Published(1, 524288, 65536, 2.44, 0.35, 6.88),
)

BACKWARD = (
    Published(256, 256, 1024, 0.42, 0.62, 0.7),
    Published(512, 512, 1024, 0.56, 0.60, 0.9),
    Published(1024, 1024, 1024, 0.94, 0.61, 1.5),
    Published(2048, 2048, 1024, 1.79, 0.69, 2.6),
    Published(4096, 4096, 1024, 3.76, 1.08, 3.5),
    Published(8192, 8192, 1024, 14.39, 2.06, 7.0),
    Published(16384, 16384, 1024, 39.56, 4.97, 8.0),
    Published(32768, 32768, 1024, 142.07, 25.63, 5.5),
    Published(32768, 32768, 32, 142.70, 21.91, 6.5),
    Published(32768, 32768, 64, 142.65, 22.29, 6.4),
    Published(32768, 32768, 128, 142.69, 23.04, 6.2),
    Published(32768, 32768, 256, 142.69, 24.27, 5.9),
    Published(32768, 32768, 512, 142.67, 25.12, 5.7),
    Published(32768, 32768, 1024, 142.55, 25.58, 5.6),
    Published(32768, 32768, 2048, 142.75, 25.64, 5.6),
    Published(32768, 32768, 4096, 142.61, 24.84, 5.7),
    Published(32768, 32768, 8192, 142.33, 25.63, 5.6),
    Published(32768, 32768, 16384, 142.40, 25.62, 5.6),
    Published(32768, 32768, 32768, 142.43, 25.63, 5.6),
)
