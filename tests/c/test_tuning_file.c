/* test_tuning_file.c - the file of a tuning: a saved tuning can be loaded; a changed file is
 * refused, with the number of the wrong line, and changes nothing. */
#include "errors.h"
#include "tunings.h"

static const char *const lines[] = {
    "forward bfloat16 causal=1 head_dim=128 rows=16384 keys=4096 kept=1024 kernel=cpu/scalar/tile "
    "tile_rows=256 split_keys=0 thread_work=0",
    "forward float32 causal=0 head_dim=8 rows=1 keys=65536 kept=65536 kernel=rules tile_rows=0 "
    "split_keys=1024 thread_work=0",
    "backward float16 causal=1 head_dim=256 rows=64 keys=64 kept=1 kernel=rules tile_rows=0 "
    "split_keys=0 thread_work=1000000",
};

enum { line_count = sizeof lines / sizeof *lines };

/* Writes a file of this machine to text[longest_text], with these lines after the heading. */
static void make_file(char *text, const char *const *of, int count) {
    const file_name name = test_file(0);
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK_OK(fdma_tuning_save(name.text));
    size_t used = read_text(name.text, text);
    for (int n = 0; n < count; n++)
        used += (size_t)snprintf(text + used, longest_text - used, "%s\n", of[n]);
    remove(name.text);
}

static fdma_status load_text(const char *text, size_t count) {
    const file_name name = test_file(1);
    write_text(name.text, text, count);
    const fdma_status status = fdma_tuning_load(name.text);
    remove(name.text);
    return status;
}

static void check_lines(void) {
    for (int n = 0; n < line_count; n++)
        if (CHECK(fdma_tuning_line(n) != NULL))
            CHECK(strcmp(fdma_tuning_line(n), lines[n]) == 0);
    CHECK(fdma_tuning_line(line_count) == NULL);
    CHECK(fdma_tuning_line(-1) == NULL);
}

static void load_lines(void) {
    char text[longest_text];
    make_file(text, lines, line_count);
    CHECK_OK(load_text(text, strlen(text)));
}

static void files_come_back(void) {
    char want[longest_text], got[longest_text];
    const file_name name = test_file(2);
    make_file(want, lines, line_count);
    CHECK_OK(load_text(want, strlen(want)));
    check_lines();
    CHECK_OK(fdma_tuning_save(name.text));
    CHECK_OK(fdma_tuning_save(name.text)); /* replaces the file */
    CHECK_INT(read_text(name.text, got), strlen(want));
    CHECK(strcmp(got, want) == 0);
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK(fdma_tuning_line(0) == NULL);
    CHECK_OK(fdma_tuning_load(name.text));
    check_lines();
    remove(name.text);
}

/* Only different tunings take more memory: a tuning that returns is the one from before. */
static void tunings_are_kept_once(void) {
    load_lines();
    const char *const first = fdma_tuning_line(0);
    CHECK_OK(fdma_tuning_load(NULL));
    load_lines();
    CHECK(fdma_tuning_line(0) == first);
}

static void entries_replace_their_class(void) {
    tuning_entry entry;
    load_lines();
    CHECK_OK(fdma_read_line("line", 1, lines[1], &entry));
    entry.choice.split_keys = 64;
    fdma_write_line(&entry);
    CHECK_OK(fdma_put_entry(&entry));
    CHECK(strcmp(fdma_tuning_line(1), lines[2]) == 0);
    CHECK(strcmp(fdma_tuning_line(2), entry.line) == 0);
    CHECK(fdma_tuning_line(3) == NULL);
    entry.choice = (tuning_choice){.kernel = ""};
    CHECK_OK(fdma_put_entry(&entry)); /* an entry without a choice removes the existing one */
    CHECK(strcmp(fdma_tuning_line(1), lines[2]) == 0);
    CHECK(fdma_tuning_line(2) == NULL);
}

/* ---- refused calls ---- */

static void check_refused(const char *text, size_t count, const char *line, const char *word) {
    const expectation want = {FDMA_INVALID_ARGUMENT, {"tuning-of-test", line, word}, 0};
    load_lines();
    check_status(load_text(text, count), &want);
    check_lines();
}

static void replace(char *to, const char *text, const char *old, const char *new) {
    const char *const at = strstr(text, old);
    if (CHECK(at != NULL))
        snprintf(to, longest_text, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
}

static void wrong_fields_are_refused(void) {
    static const struct {
        const char *old, *new, *word;
    } changes[] = {
        {"forward", "decode", "operation"},
        {"forward", "", "fdma_tuning_save"},
        {"bfloat16", "float64", "dtype"},
        {"bfloat16", "bf16", "dtype"},
        {"causal=1", "causal=2", "causal"},
        {"causal=1", "causal=-1", "causal"},
        {"head_dim=128", "head_dim=12", "head_dim"},
        {"head_dim=128", "head_dim=264", "head_dim"},
        {"head_dim=128", "head_dim=0", "head_dim"},
        {"rows=16384", "rows=16385", "rows"},
        {"rows=16384", "rows=0", "rows"},
        {"keys=4096", "keys=4097", "keys"},
        {"keys=4096", "keys=-4096", "keys"},
        {"keys=4096", "keys=512", "kept"},
        {"kept=1024", "kept=1000", "kept"},
        {"kept=1024", "kept=4294967296", "kept"},
        {"cpu/scalar/tile", "cpu/scalar", "kernel"}, /* a kernel, but of other operations */
        {"cpu/scalar/tile", "cpu/none", "kernel"},
        {"cpu/scalar/tile", "cuda/sm90/d128", "kernel"},
        {"cpu/scalar/tile", "reference", "kernel"},
        {"tile_rows=256", "tile_rows=65537", "tile_rows"},
        {"tile_rows=256", "tile_rows=-1", "tile_rows"},
        {"split_keys=0", "split_keys=1073741825", "split_keys"},
        {"thread_work=0", "thread_work=1000001", "thread_work"},
        {"thread_work=0", "thread_work=99999999999999999999", "thread_work"},
        {"thread_work=0", "thread_work=0 more", "fdma_tuning_save"},
        {"thread_work=0", "thread_work=", "fdma_tuning_save"},
        {"thread_work=0", "thread_work=00", "fdma_tuning_save"},
        {" causal", "  causal", "fdma_tuning_save"},
        {"kernel=cpu/scalar/tile tile_rows=256", "kernel=rules tile_rows=0", "choice"},
        {"kernel=", "cernel=", "fdma_tuning_save"},
    };
    char right[longest_text], wrong[longest_text];
    make_file(right, lines, line_count);
    for (int n = 0; n < TEST_COUNT(changes); n++) {
        test_context("%s for %s", changes[n].new, changes[n].old);
        replace(wrong, right, changes[n].old, changes[n].new);
        check_refused(wrong, strlen(wrong), "line 4", changes[n].word);
    }
}

static void other_machines_are_refused(void) {
    char right[longest_text], wrong[longest_text];
    make_file(right, lines, line_count);
    replace(wrong, right, "fdma-tuning 1", "fdma-tuning 2");
    check_refused(wrong, strlen(wrong), "line 1", "fdma-tuning 2");
    replace(wrong, right, "version ", "version 9");
    check_refused(wrong, strlen(wrong), "line 2", "measure");
    replace(wrong, right, "machine ", "machine Other ");
    check_refused(wrong, strlen(wrong), "line 3", "Other");
    replace(wrong, right, "machine ", "cpu ");
    check_refused(wrong, strlen(wrong), "line 3", "machine");
    check_refused("", 0, "line 1", "fdma-tuning");
}

static void damaged_files_are_refused(void) {
    char right[longest_text], wrong[longest_text];
    make_file(right, lines, line_count);
    const size_t count = strlen(right);
    check_refused(right, count - 1, "line 6", "end");
    snprintf(wrong, sizeof wrong, "%s%s\n", right, lines[0]);
    check_refused(wrong, strlen(wrong), "line 7", "second");
    snprintf(wrong, sizeof wrong, "%s\n", right);
    check_refused(wrong, strlen(wrong), "line 7", "fdma_tuning_save");
    snprintf(wrong, sizeof wrong, "%s%600d\n", right, 1);
    check_refused(wrong, strlen(wrong), "line 7", "end");
    memcpy(wrong, right, count);
    wrong[count - 20] = '\0';
    check_refused(wrong, count, "line 6", "end");
}

static void too_many_entries_are_refused(void) {
    enum { bytes = (most_entries + 10) * tuning_line };
    char *const text = test_alloc(bytes);
    char heading[longest_text];
    make_file(heading, lines, 0);
    size_t used = (size_t)snprintf(text, bytes, "%s", heading);
    for (int n = 0; n <= most_entries; n++)
        used += (size_t)snprintf(text + used, bytes - used,
                                 "forward %s causal=%d head_dim=%d rows=%d keys=64 kept=64 "
                                 "kernel=rules tile_rows=64 split_keys=0 thread_work=0\n",
                                 n / 512 == 0   ? "float32"
                                 : n / 512 == 1 ? "float16"
                                                : "bfloat16",
                                 n / 256 % 2, 8 * (n / 8 % 32 + 1), 1 << n % 8);
    check_refused(text, used, "line 1028", "1024");
}

static void files_that_are_none_are_refused(void) {
    const expectation no_file = {FDMA_INVALID_ARGUMENT, {"not-there", "opened"}, 0};
    const expectation no_folder = {FDMA_INVALID_ARGUMENT, {"not-there", "written"}, 0};
    const expectation folder = {FDMA_INVALID_ARGUMENT, {"cannot"}, 0};
    const expectation no_name = {FDMA_INVALID_ARGUMENT, {"path", "NULL"}, 0};
    load_lines();
    check_status(fdma_tuning_load("not-there/tuning"), &no_file);
    check_status(fdma_tuning_save("not-there/tuning"), &no_folder);
    check_status(fdma_tuning_load("."), &folder);
    check_status(fdma_tuning_save("."), &folder);
    check_status(fdma_tuning_save(NULL), &no_name);
    check_lines();
}

/* A file with some bytes changed is loaded if it is still valid, and otherwise refused with one
 * line. */
static void damage_does_no_harm(void) {
    char right[longest_text], text[longest_text], again[longest_text];
    uint64_t state = 1;
    int taken = 0;
    const file_name name = test_file(3);
    make_file(right, lines, line_count);
    const size_t count = strlen(right);
    const int repeats = test_divisor() > 1 ? 1000 : 4000; // a few are valid
    for (int n = 0; n < repeats; n++) {
        memcpy(text, right, count);
        for (int64_t change = random_below(&state, 3); change >= 0; change--)
            text[random_below(&state, (int64_t)count)] =
                (char)(random_below(&state, 3) ? '0' + random_below(&state, 10)
                                               : random_below(&state, 256));
        if (load_text(text, count) != FDMA_OK) {
            CHECK(fdma_last_error()[0] != '\0' && strchr(fdma_last_error(), '\n') == NULL);
            continue;
        }
        taken++;
        CHECK_OK(fdma_tuning_save(name.text));
        CHECK_INT(read_text(name.text, again), count);
        CHECK(memcmp(again, text, count) == 0);
    }
    CHECK(taken > 0);
    remove(name.text);
}

static void numbers_are_rounded(void) {
    static const int64_t want[][2] = {
        {0, 0},  {1, 1},   {2, 2},       {3, 4},       {4, 4},       {5, 4},      {6, 8},
        {11, 8}, {12, 16}, {4095, 4096}, {4097, 4096}, {6143, 4096}, {6144, 8192}};
    for (int n = 0; n < TEST_COUNT(want); n++)
        CHECK_INT(fdma_nearest_power(want[n][0]), want[n][1]);
    CHECK_INT(fdma_nearest_power(INT32_MAX), INT64_C(1) << 31);
}

static const test_entry tests[] = {
    TEST(files_come_back),
    TEST(tunings_are_kept_once),
    TEST(entries_replace_their_class),
    TEST(wrong_fields_are_refused),
    TEST(other_machines_are_refused),
    TEST(damaged_files_are_refused),
    TEST(too_many_entries_are_refused),
    TEST(files_that_are_none_are_refused),
    TEST(damage_does_no_harm),
    TEST(numbers_are_rounded),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
