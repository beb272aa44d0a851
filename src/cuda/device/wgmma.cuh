/* The two products of attention on Hopper's tensor cores: 64 rows of a warpgroup against a block of
 * keys in shared memory.
 *
 * A block of rows lies in panels of 64 channels, each [rows][128 bytes], the eight 16-byte chunks
 * of a row permuted by the row's number: the 128-byte swizzle (PTX, asynchronous warpgroup level
 * matrix shared memory layout). Panels begin at multiples of 1024 bytes, where the pattern begins.
 *
 * Accumulators: thread t of a warp holds of rows t / 4 and t / 4 + 8 the columns 8 n + 2 (t % 4)
 * and the one after it, at [4 n + 2 * (the later row) + (the later column)]. */
#ifndef FDMA_CUDA_DEVICE_WGMMA_CUH
#define FDMA_CUDA_DEVICE_WGMMA_CUH

#include "cuda/device/ptx.cuh"

/* Orders registers and shared memory written so far before the wgmma that follow. */
__device__ static inline void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static inline void wgmma_commit_group(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most `pending` of the latest groups are not done. */
template <int pending> __device__ static inline void wgmma_wait_group(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* D = A B + D (accumulate 0: D = A B), a warpgroup together. A [64 x 16] and B [16 x n] in shared
 * memory, both with 16 contiguous along k unless transposed; or A in registers, and B contiguous
 * along n. */

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static inline void wgmma_m64n32k16(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.%21.%21 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                 " %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, %18, 1, 1, %19, %20;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static inline void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.%37.%37 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                 " %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                 " %30, %31}, "
                 "%32, %33, %34, 1, 1, %35, %36;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static inline void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.%69.%69 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                 " %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                 " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                 " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                 " %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                 " %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                 " %60, %61, %62, %63}, "
                 "%64, %65, %66, 1, 1, %67, %68;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static inline void wgmma_m64n64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.%37.%37 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
        " %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static inline void wgmma_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.%69.%69 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
        " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        " %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static inline void wgmma_m64n256k16(float (&d)[128], const uint32_t (&a)[4],
                                               uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.%133.%133 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
        " %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        " %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
        " %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
        " %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
        " %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "
        " %124, %125, %126, %127}, "
        "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
          "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
          "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
          "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
          "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
          "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
          "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
          "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
          "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(element_type<element>::ptx));
}

static constexpr int panel_channels = 64; // of 16 bits: one line of the swizzle
static constexpr int line_bytes = 128;    // a row of a panel
static constexpr int chunk_bytes = 16;    // what the swizzle moves
static constexpr int swizzle_rows = 8;    // after which the pattern repeats
static constexpr int step_k = 16;         // channels or keys of one wgmma

/* Where chunk `chunk` of row `row` of a panel lies. */
__device__ static inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
    return row * line_bytes + ((chunk ^ row % swizzle_rows) * chunk_bytes);
}

/* A matrix in shared memory, from `address` on. panel_bytes: from panel to panel, where the
 * product goes along channels. */
__device__ static inline uint64_t describe_matrix(uint32_t address, uint32_t panel_bytes) {
    const uint64_t swizzle_128 = 1;
    return (uint64_t)(address & 0x3ffff) >> 4 | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)(swizzle_rows * line_bytes >> 4) << 32 | swizzle_128 << 62;
}

/* A matrix [16][columns] in shared memory without a swizzle, whose rows 8 to 15 are those before
 * them again: eight columns of eight rows are 128 bytes, `octet_bytes` after those before them. */
__device__ static inline uint64_t describe_octets(uint32_t address, uint32_t octet_bytes) {
    return (uint64_t)(address & 0x3ffff) >> 4 | (uint64_t)(octet_bytes >> 4) << 32;
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0,
          int accumulators>
__device__ static inline void multiply(float (&d)[accumulators], uint64_t a, uint64_t b) {
    if constexpr (accumulators == 16)
        wgmma_m64n32k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
    else if constexpr (accumulators == 32)
        wgmma_m64n64k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
    else
        wgmma_m64n128k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
}

template <typename element, int accumulators>
__device__ static inline void multiply(float (&d)[accumulators], const uint32_t (&a)[4],
                                       uint64_t b) {
    if constexpr (accumulators == 32)
        wgmma_m64n64k16<element>(d, a, b);
    else if constexpr (accumulators == 64)
        wgmma_m64n128k16<element>(d, a, b);
    else
        wgmma_m64n256k16<element>(d, a, b);
}

/* S = Q K^T, begun: q [64 rows of q_rows][channels], k [2 * accumulators keys of
 * key_rows][channels]. */
template <typename element, int channels, int q_rows, int key_rows, int accumulators>
__device__ static inline void begin_abt(float (&scores)[accumulators], uint32_t q, uint32_t k) {
    const uint64_t a = describe_matrix(q, 0), b = describe_matrix(k, 0);
    multiply<element, 0>(scores, a, b);
#pragma unroll
    for (int c = step_k; c < channels; c += step_k) {
        const int panel = c / panel_channels, inside = c % panel_channels * 2;
        multiply<element, 1>(scores, a + ((panel * q_rows * line_bytes + inside) >> 4),
                             b + ((panel * key_rows * line_bytes + inside) >> 4));
    }
}

/* O += P V, begun: weights as the accumulators of S in pairs, v [16 * steps keys of key_rows]
 * [2 * accumulators channels]. */
template <typename element, int key_rows, int steps, int accumulators>
__device__ static inline void
begin_ab(float (&out)[accumulators], const uint32_t (&weights)[key_rows / step_k][4], uint32_t v) {
    const uint64_t b = describe_matrix(v, key_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element>(out, weights[j], b + (j * step_k * line_bytes >> 4));
}

/* D = A^T B, begun: a [16 * steps rows][64], b [16 * steps rows of b_rows][2 * accumulators
 * channels]. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static inline void begin_atb(float (&d)[accumulators], uint32_t a_address,
                                        uint32_t b_address) {
    const uint64_t a = describe_matrix(a_address, 0);
    const uint64_t b = describe_matrix(b_address, b_rows * line_bytes);
    multiply<element, 0, 1, 1>(d, a, b);
#pragma unroll
    for (int j = 1; j < steps; j++)
        multiply<element, 1, 1, 1>(d, a + (j * step_k * line_bytes >> 4),
                                   b + (j * step_k * line_bytes >> 4));
}

/* D += A B, begun: a [64 rows][16 * steps], one panel; b [16 * steps rows of b_rows][2 *
 * accumulators channels]. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static inline void begin_ab(float (&d)[accumulators], uint32_t a_address,
                                       uint32_t b_address) {
    const uint64_t a = describe_matrix(a_address, 0);
    const uint64_t b = describe_matrix(b_address, b_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element, 1, 0, 1>(d, a + (j * step_k * 2 >> 4),
                                   b + (j * step_k * line_bytes >> 4));
}

#endif
