/* Context parallel attention in plain C: the CUDA devices of one process compute one sequence
 * together, with NCCL between them, and are checked against fdma_attention() on all of it. Forward
 * only.
 *
 * Each device is a rank and has some consecutive tokens, a piece of the sequence. From earlier
 * ranks it needs only the keys that the last query before its own keeps: at most window + recent
 * for each kv head, for a sequence of any length. So a rank goes on from there as a stream does
 * (fdma.h, "Streams"), but without waiting for the ranks before it:
 *
 *   1. Each rank scores its own keys and selects among them by the rules of the sequence. The keys
 *      that are kept to the end are its candidates: later ranks keep no others. (Its first `sinks`
 *      valid keys are sinks here. They take as many rows of the window as the sinks of the sequence
 *      do there, so no key is lost that the sequence keeps.)
 *   2. The ranks gather the candidates of all: scores, positions, keys and values.
 *   3. Each rank selects among the candidates of the ranks before it. The candidates that are kept
 *      to the end are its carried keys: fdma_attention() goes on from their scores and positions,
 *      and its queries also attend to their keys and values.
 *
 * The selection among candidates runs on the host, to which their scores and positions are copied:
 * there they are easily sorted, and fdma_select() gives the same bits on every device. Rows of keys
 * and values stay on the devices.
 *
 * Without CUDA and NCCL, the ranks run in a loop on the CPU: to try it, and to test it.
 *
 *     cc -std=c11 -O2 -Iinclude examples/context_parallel.c -Lbuild -lfdma \
 *        -Wl,-rpath,$PWD/build -lm -o context_parallel
 *     ./context_parallel --cpu 3 1000
 *
 * With them, the ranks are all CUDA devices, two or more, unless --cpu is given:
 *
 *     cc -std=c11 -O2 -Iinclude -DFDMA_HAVE_NCCL=1 -I/usr/local/cuda/include \
 *        examples/context_parallel.c -Lbuild -lfdma -Wl,-rpath,$PWD/build \
 *        -L/usr/local/cuda/lib64 -lcudart -lnccl -lm -o context_parallel
 *     ./context_parallel
 *
 * Exit status: 0; 1 where the ranks and the whole sequence disagree, or a call fails; 2 bad
 * usage. */
#include "context_parallel_check.h"
#include "context_parallel_ranks.h"

enum { default_tokens = 16384 };

/* Consecutive tokens of the sequence, in the memory of a rank. */
typedef struct piece {
    rank *on;
    int64_t offset, len; /* the first token, and how many there are */
    void *q, *k, *v, *dt_proj, *a;
    void *out;                      /* [len, q_heads, head_dim] bfloat16 */
    float *lse;                     /* [q_heads, len] */
    float *score;                   /* [kv_heads, len] */
    int32_t *expiry, *slot;         /* [kv_heads, rows + len] */
    fdma_cache candidates, carried; /* at most `rows` keys for each kv head */
    float *all_score;               /* [kv_heads, ranks * rows]: the candidates of all ranks */
    int32_t *all_position;          /* the same shape: as the rank numbers its tokens; -1: none */
    void *all_k, *all_v;            /* [kv_heads, ranks * rows, head_dim] */
    int32_t *all_expiry, *all_slot; /* [kv_heads, ranks * rows]: which of them are carried keys */
} piece;

/* ---- tensors ---- */

static piece new_piece(rank *on, const sequence *of, int64_t offset, int64_t len) {
    const rank host = cpu_rank();
    return (piece){
        .on = on,
        .offset = offset,
        .len = len,
        .q = take_copy(on, &host, of->q + offset * q_width, len * q_width, sizeof *of->q),
        .k = take_copy(on, &host, of->k + offset * kv_width, len * kv_width, sizeof *of->k),
        .v = take_copy(on, &host, of->v + offset * kv_width, len * kv_width, sizeof *of->v),
        .dt_proj = take_copy(on, &host, of->dt_proj, (int64_t)kv_heads * kv_width, sizeof(float)),
        .a = take_copy(on, &host, of->a, kv_heads, sizeof(float)),
        .out = take(on, len * q_width, sizeof(uint16_t)),
        .lse = take(on, q_heads * len, sizeof(float)),
        .score = take(on, kv_heads * len, sizeof(float)),
        .expiry = take(on, kv_heads * (rows + len), sizeof(int32_t)),
        .slot = take(on, kv_heads * (rows + len), sizeof(int32_t)),
    };
}

static fdma_cache new_cache(rank *on) {
    fdma_cache cache = {.sequences = 1, .kv_heads = kv_heads, .head_dim = head_dim};
    size_t bytes;
    cache.window = window, cache.recent = recent, cache.sinks = sinks;
    cache.dtype = FDMA_BFLOAT16, cache.device = on->device;
    demand(fdma_cache_bytes(&cache, &bytes));
    demand(fdma_cache_init(&cache, take(on, (int64_t)bytes, 1)));
    return cache;
}

/* Adds the memory that a piece needs beside its own tokens; `all` is ranks * rows. */
static void add_candidates(piece *to, int64_t all) {
    rank *const on = to->on;
    to->candidates = new_cache(on);
    to->carried = new_cache(on);
    to->all_score = take(on, kv_heads * all, sizeof(float));
    to->all_position = take(on, kv_heads * all, sizeof(int32_t));
    to->all_k = take(on, all * kv_width, sizeof(uint16_t));
    to->all_v = take(on, all * kv_width, sizeof(uint16_t));
    to->all_expiry = take(on, kv_heads * all, sizeof(int32_t));
    to->all_slot = take(on, kv_heads * all, sizeof(int32_t));
}

static fdma_tensor heads_of(void *data, int64_t len, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_BFLOAT16, 1, len, heads, head_dim);
}

/* As in a cache: the rows of a kv head are neighbours. */
static fdma_tensor rows_of(void *data, int64_t len) {
    fdma_tensor made = heads_of(data, len, kv_heads);
    made.stride[1] = head_dim;
    made.stride[2] = len * head_dim;
    return made;
}

static fdma_tensor floats_of(float *data, int64_t heads, int64_t len) {
    return fdma_tensor_3d(data, FDMA_FLOAT32, 1, heads, len);
}

static fdma_selection selection_of(int32_t *expiry, int32_t *slot, int64_t heads, int64_t len) {
    return (fdma_selection){.size = sizeof(fdma_selection),
                            .expiry = fdma_tensor_3d(expiry, FDMA_INT32, 1, heads, len),
                            .slot = fdma_tensor_3d(slot, FDMA_INT32, 1, heads, len)};
}

/* ---- calls ---- */

static void score_keys(const piece *of) {
    fdma_score_args args = {
        .size = sizeof args,
        .v = heads_of(of->v, of->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .score = floats_of(of->score, kv_heads, of->len),
        .exec = exec_of(of->on),
    };
    size_t bytes;
    demand(fdma_score_workspace(&args, &bytes));
    lend_workspace(of->on, &args.exec, bytes);
    demand(fdma_score(&args));
}

static void select_keys(rank *on, fdma_tensor score, fdma_selection *selection) {
    fdma_select_args args = {
        .size = sizeof args,
        .score = score,
        .selection = selection,
        .window = window,
        .recent = recent,
        .sinks = sinks,
        .exec = exec_of(on),
    };
    size_t bytes;
    demand(fdma_select_workspace(&args, &bytes));
    lend_workspace(on, &args.exec, bytes);
    demand(fdma_select(&args));
}

/* Copies the keys that a selection keeps to the end to the rows of their slots. */
static void store_kept_keys(rank *on, const fdma_cache *to, fdma_tensor k, fdma_tensor v,
                            fdma_tensor score, const fdma_selection *selection) {
    fdma_cache_store_args args = {
        .size = sizeof args,
        .cache = *to,
        .k = k,
        .v = v,
        .score = score,
        .selection = selection,
        .exec = exec_of(on),
    };
    size_t bytes;
    demand(fdma_cache_store_workspace(&args, &bytes));
    lend_workspace(on, &args.exec, bytes);
    demand(fdma_cache_store(&args));
}

/* Attention of a piece with the carried keys `before`; NULL: none. */
static void attend(const piece *of, const fdma_cache *before, fdma_selection *selection) {
    fdma_attention_args args = {
        .size = sizeof args,
        .q = heads_of(of->q, of->len, q_heads),
        .k = heads_of(of->k, of->len, kv_heads),
        .v = heads_of(of->v, of->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .out = heads_of(of->out, of->len, q_heads),
        .lse = floats_of(of->lse, q_heads, of->len),
        .selection = selection,
        .window = window,
        .recent = recent,
        .sinks = sinks,
        .causal = 1,
        .exec = exec_of(of->on),
    };
    size_t bytes;
    if (before != NULL) {
        args.table_in = before->table;
        args.k_carried = before->k, args.v_carried = before->v, args.bias_carried = before->bias;
    }
    demand(fdma_attention_workspace(&args, &bytes));
    lend_workspace(of->on, &args.exec, bytes);
    demand(fdma_attention(&args));
}

/* ---- the three steps ---- */

static void find_candidates(const piece *of) {
    fdma_selection selection = selection_of(of->expiry, of->slot, kv_heads, of->len);
    const fdma_tensor score = floats_of(of->score, kv_heads, of->len);
    score_keys(of);
    select_keys(of->on, score, &selection);
    store_kept_keys(of->on, &of->candidates, heads_of(of->k, of->len, kv_heads),
                    heads_of(of->v, of->len, kv_heads), score, &selection);
}

static void gather_candidates(int ranks, const piece *pieces) {
    enum { tensors = 4, gathers = kv_heads * tensors, row_size = head_dim * sizeof(uint16_t) };
    transfer *const transfers = allocate((size_t)(gathers * ranks), sizeof *transfers);
    for (int r = 0; r < ranks; r++) {
        const piece *const of = &pieces[r];
        const fdma_cache *const own = &of->candidates;
        const struct {
            const char *own;
            char *all;
            size_t size; // bytes of one candidate
        } each[tensors] = {{own->table.score.data, (char *)of->all_score, sizeof(float)},
                           {own->table.position.data, (char *)of->all_position, sizeof(int32_t)},
                           {own->k.data, of->all_k, row_size},
                           {own->v.data, of->all_v, row_size}};
        for (int n = 0; n < gathers; n++) {
            const int tensor = n % tensors, g = n / tensors;
            const size_t bytes = rows * each[tensor].size, head = (size_t)g * bytes;
            transfers[n * ranks + r] = (transfer){.of = of->on,
                                                  .own = each[tensor].own + head,
                                                  .all = each[tensor].all + (size_t)ranks * head,
                                                  .bytes = bytes};
        }
    }
    all_gather(ranks, gathers, transfers);
    free(transfers);
}

typedef struct candidate {
    int32_t position; /* in the sequence */
    int64_t index;    /* among the candidates of all ranks */
} candidate;

static int compare_positions(const void *a, const void *b) {
    const int32_t x = ((const candidate *)a)->position, y = ((const candidate *)b)->position;
    return (x > y) - (x < y);
}

/* Lists the candidates of the first `ranks` ranks, of one kv head, in the order of positions. */
static int64_t list_candidates(int ranks, const piece *pieces, const int32_t *positions,
                               candidate *list) {
    int64_t count = 0;
    for (int64_t n = 0; n < (int64_t)ranks * rows; n++)
        if (positions[n] >= 0) { // a rank of few tokens has fewer
            const int64_t position = pieces[n / rows].offset + positions[n];
            list[count++] = (candidate){(int32_t)position, n};
        }
    qsort(list, (size_t)count, sizeof *list, compare_positions);
    return count;
}

/* For one kv head, on the host: selects the carried keys of rank r among the candidates of the
 * ranks before it. slot [ranks * rows] is the slot of each candidate, -1 if it is not carried;
 * carried [rows] is the position of each carried key, -1 if the row is empty. */
static void select_candidates(int ranks, const piece *pieces, int r, const float *score,
                              const int32_t *position, int32_t *slot, int32_t *carried) {
    const int64_t all = (int64_t)ranks * rows;
    rank host = cpu_rank();
    candidate *const list = take(&host, all, sizeof *list);
    float *const sorted_score = take(&host, all, sizeof *sorted_score);
    int32_t *const sorted_expiry = take(&host, all, sizeof *sorted_expiry);
    int32_t *const sorted_slot = take(&host, all, sizeof *sorted_slot);
    const int64_t count = list_candidates(r, pieces, position, list);
    for (int64_t n = 0; n < count; n++)
        sorted_score[n] = score[list[n].index];
    fdma_selection selection = selection_of(sorted_expiry, sorted_slot, 1, count);
    select_keys(&host, floats_of(sorted_score, 1, count), &selection);
    for (int64_t n = 0; n < all; n++)
        slot[n] = -1;
    for (int64_t row = 0; row < rows; row++)
        carried[row] = -1;
    for (int64_t n = 0; n < count; n++)
        if (sorted_expiry[n] == count) { // kept to the end
            slot[list[n].index] = sorted_slot[n];
            carried[sorted_slot[n]] = list[n].position;
        }
    close_ranks(1, &host);
}

/* Finds the carried keys of rank r and copies them to their rows. A cache has rows for them, and
 * fdma_cache_store() copies the keys of a selection, which the host writes here. */
static void find_carried_keys(int ranks, const piece *pieces, int r) {
    const piece *const of = &pieces[r];
    const fdma_table *const table = &of->carried.table;
    const int64_t all = (int64_t)ranks * rows, count = kv_heads * all;
    const int32_t seen = (int32_t)of->offset;
    rank host = cpu_rank();
    float *const score = take_copy(&host, of->on, of->all_score, count, sizeof *score);
    int32_t *const position = take_copy(&host, of->on, of->all_position, count, sizeof *position);
    int32_t *const expiry = take(&host, count, sizeof *expiry);
    int32_t *const slot = take(&host, count, sizeof *slot);
    int32_t *const carried = take(&host, kv_heads * rows, sizeof *carried);
    for (int64_t g = 0; g < kv_heads; g++)
        select_candidates(ranks, pieces, r, score + g * all, position + g * all, slot + g * all,
                          carried + g * rows);
    for (int64_t n = 0; n < count; n++) // kept to the end, or never
        expiry[n] = (int32_t)(slot[n] >= 0 ? all : n % all);
    copy(of->on, of->all_expiry, expiry, count, sizeof *expiry);
    copy(of->on, of->all_slot, slot, count, sizeof *slot);
    fdma_selection selection = selection_of(of->all_expiry, of->all_slot, kv_heads, all);
    selection.window = window, selection.recent = recent, selection.sinks = sinks;
    selection.kv_len = all, selection.scope = FDMA_SCOPE_CAUSAL;
    store_kept_keys(of->on, &of->carried, rows_of(of->all_k, all), rows_of(of->all_v, all),
                    floats_of(of->all_score, kv_heads, all), &selection);
    // The call took the candidates for a prompt. In the sequence they have other positions.
    copy(of->on, table->position.data, carried, kv_heads * rows, sizeof *carried);
    copy(of->on, table->seen.data, &seen, 1, sizeof seen);
    close_ranks(1, &host);
}

static void attend_ranks(int ranks, const piece *pieces) {
    for (int r = 0; r < ranks; r++)
        find_candidates(&pieces[r]);
    gather_candidates(ranks, pieces);
    for (int r = 0; r < ranks; r++) {
        const piece *const of = &pieces[r];
        fdma_selection selection = selection_of(of->expiry, of->slot, kv_heads, rows + of->len);
        find_carried_keys(ranks, pieces, r);
        attend(of, &of->carried, &selection);
    }
}

/* ---- the check ---- */

static results copy_results(rank *host, const piece *of) {
    const rank *const on = of->on;
    const void *const carried = of->carried.table.position.data; // NULL for the whole sequence
    const int64_t len = of->len, keys = kv_heads * (rows + len);
    return (results){
        .offset = of->offset,
        .len = len,
        .expiry = take_copy(host, on, of->expiry, keys, sizeof(int32_t)),
        .carried = carried ? take_copy(host, on, carried, kv_heads * rows, sizeof(int32_t)) : NULL,
        .lse = take_copy(host, on, of->lse, q_heads * len, sizeof(float)),
        .out = take_copy(host, on, of->out, q_width * len, sizeof(uint16_t)),
    };
}

/* The whole sequence is computed on the first of the ranks. */
static bool are_right(int ranks, const piece *pieces, const sequence *of) {
    const piece all = new_piece(pieces[0].on, of, 0, of->len);
    fdma_selection selection = selection_of(all.expiry, all.slot, kv_heads, of->len);
    attend(&all, NULL, &selection);
    rank host = cpu_rank();
    const results whole = copy_results(&host, &all);
    bool right = true;
    for (int r = 0; r < ranks; r++) {
        rank memory = cpu_rank();
        const results found = copy_results(&memory, &pieces[r]);
        right = is_right(r, &found, &whole) && right;
        close_ranks(1, &memory);
    }
    close_ranks(1, &host);
    return right;
}

static void show_bytes(int ranks, int64_t total) {
    const double key = 2 * kv_width * sizeof(uint16_t); // and value
    const double candidates = rows * (key + kv_heads * (sizeof(float) + sizeof(int32_t)));
    printf("received by each rank: %.1f kB, for any number of tokens; all keys and values of the "
           "others: %.1f kB\n",
           1e-3 * candidates * (ranks - 1), 1e-3 * key * (double)total * (ranks - 1) / ranks);
}

int main(int argc, char **argv) {
    const bool on_cpu = argc > 2 && strcmp(argv[1], "--cpu") == 0;
    const int first = on_cpu ? 3 : 1;
    const bool help = argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (help || argc > first + 1 || (!on_cpu && argc > 1 && argv[1][0] == '-')) {
        fprintf(help ? stdout : stderr, "usage: context_parallel [--cpu RANKS] [TOKENS]\n");
        return help ? 0 : 2;
    }
    const int64_t total = argc > first ? strtoll(argv[first], NULL, 10) : default_tokens;
    rank *const on = allocate(most_ranks, sizeof *on);
    const int64_t ranks = on_cpu ? open_host(atoi(argv[2]), on) : open_devices(on);
    const int64_t lengths = ranks * (ranks + 1) / 2;
    if (total < lengths || total > INT32_MAX)
        fail("TOKENS", "want ranks * (ranks + 1) / 2 or more, below 2^31");
    piece *const pieces = allocate((size_t)ranks, sizeof *pieces);
    const sequence whole = new_sequence(total);
    for (int64_t r = 0; r < ranks; r++) { // pieces of different lengths: about 1 : 2 : 3 ...
        const int64_t begin = total * (r * (r + 1) / 2) / lengths;
        const int64_t end = total * ((r + 1) * (r + 2) / 2) / lengths;
        pieces[r] = new_piece(&on[r], &whole, begin, end - begin);
        add_candidates(&pieces[r], ranks * rows);
    }
    attend_ranks((int)ranks, pieces);
    const bool right = are_right((int)ranks, pieces, &whole);
    show_bytes((int)ranks, total);
    close_ranks((int)ranks, on);
    free_sequence(&whole);
    free(pieces);
    free(on);
    return right ? 0 : 1;
}
