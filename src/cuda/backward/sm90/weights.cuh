/* P and dS from the products of a step. All of it is in registers: a lane has two rows of slots,
 * and of the columns of queries those that are 8n and 8n + 1 after its first one. */
#pragma once

#include "cuda/backward/sm90/rows.cuh"

/* The part of a step's array that belongs to its t-th tile. */
template <int tiles, typename item, int n> __device__ static auto &of_tile(item (&all)[n], int t) {
    using own = item[n / tiles];
    return (own &)all[t * (n / tiles)];
}

/* What the weights of a thread's rows depend on in a generation. */
struct row_inputs {
    int2 kept[2]; // the positions that keep the key
    float bias[2];
};

/* Whether some query of a step does not keep a key of the warp's rows by its position. */
template <int queries> __device__ static bool is_cut(const int2 (&kept)[2], int32_t first) {
    const int32_t last = first + queries - 1;
    return __any_sync(~0u, max(kept[0].x, kept[1].x) > first || min(kept[0].y, kept[1].y) <= last);
}

template <typename element, int n>
__device__ static void pack_products(const float (&p)[n], uint32_t (&packed)[n / 8][4]) {
#pragma unroll
    for (int i = 0; i < n; i += 2)
        packed[i / 8][i / 2 % 4] = element_type<element>::pack(p[i], p[i + 1]);
}

/* Replaces S by P = 2^(S - lse). */
template <int n>
__device__ static void weigh_products(float unit, const float (&bias)[2],
                                      const float2 (&lse)[n / 4], float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = lse[i / 4];
        const float b = bias[i / 2 % 2];
        s[i] = ex2_approx(fmaf(s[i], unit, b - column.x));
        s[i + 1] = ex2_approx(fmaf(s[i + 1], unit, b - column.y));
    }
}

/* P with softcap, and P times the derivative of softcap in `sloped`. Both are kept only as pairs of
 * 16 bits, and lse is read from shared memory, because registers do not suffice. */
template <typename element, int n>
__device__ static void
weigh_softcapped(float unit, float softcap_scale, const float (&bias)[2], const float2 *lse,
                 const float (&s)[n], uint32_t (&weights)[n / 8][4], uint32_t (&sloped)[n / 8][4]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        if (i % 8 == 0)
            __syncwarp(); // so that lse is not loaded all at once: registers do not suffice
        const float2 column = lse[i / 4 * 4];
        float p[2], slope[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float t = tanh_of(s[i + k] * softcap_scale);
            p[k] = ex2_approx(fmaf(t, unit, bias[i / 2 % 2] - (k ? column.y : column.x)));
            slope[k] = 1 - t * t;
        }
        weights[i / 8][i / 2 % 4] = element_type<element>::pack(p[0], p[1]);
        sloped[i / 8][i / 2 % 4] = element_type<element>::pack(p[0] * slope[0], p[1] * slope[1]);
    }
}

/* dS = P (dP - delta), whose sums over the columns are added to `sums`, from P in float32. */
template <typename element, int n>
__device__ static void differentiate_products(const float2 (&delta)[n / 4], const float (&dp)[n],
                                              const float (&p)[n], uint32_t (&ds)[n / 8][4],
                                              float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = delta[i / 4];
        const float low = p[i] * (dp[i] - column.x), high = p[i + 1] * (dp[i + 1] - column.y);
        sums[i / 2 % 2] += low + high;
        ds[i / 8][i / 2 % 4] = element_type<element>::pack(low, high);
    }
}

/* The same from P in pairs. masked: where P is 0, dS is 0 even if dP is NaN. With dropout dP is 0
 * where the sign of P is set, and otherwise multiplied by `factor`. */
template <class config, bool masked, int n>
__device__ static void
differentiate_pairs(float factor, const float2 (&delta)[n / 4], const float (&dp)[n],
                    const uint32_t (&weights)[n / 8][4], const uint32_t (&sloped)[n / 8][4],
                    uint32_t (&ds)[n / 8][4], float (&sums)[2]) {
    using element = typename config::element;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = delta[i / 4];
        float2 p = unpack<element>(weights[i / 8][i / 2 % 4]);
        float low = dp[i] - column.x, high = dp[i + 1] - column.y;
        if constexpr (config::drops) {
            low = fmaf(signbit(p.x) ? 0 : dp[i], factor, -column.x);
            high = fmaf(signbit(p.y) ? 0 : dp[i + 1], factor, -column.y);
            p = make_float2(fabsf(p.x), fabsf(p.y));
        }
        float2 both =
            make_float2(masked && p.x == 0 ? 0 : p.x * low, masked && p.y == 0 ? 0 : p.y * high);
        sums[i / 2 % 2] += both.x + both.y;
        if constexpr (config::has_softcap) {
            const float2 slope = unpack<element>(sloped[i / 8][i / 2 % 4]);
            both = make_float2(masked && p.x == 0 ? 0 : slope.x * low,
                               masked && p.y == 0 ? 0 : slope.y * high);
        }
        ds[i / 8][i / 2 % 4] = element_type<element>::pack(both.x, both.y);
    }
}
