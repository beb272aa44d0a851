/* test_windows.c - a host that loads and frees the DLL while the threads of its pool sleep. */
#include "test.h"

#include "fdma.h"

#include <windows.h>

#include <tlhelp32.h>

typedef fdma_status (*forward_call)(const fdma_forward_args *);
typedef fdma_status (*workspace_call)(const fdma_forward_args *, size_t *);

/* Attention of 512 equal queries over as many equal keys: each output is the value of all keys. */
static int attends(HMODULE library, int32_t threads) {
    enum { len = 512, head_dim = 32 };
    static float zeros[len * head_dim], v[len * head_dim], out[len * head_dim];
    static char workspace[1 << 24];
    const workspace_call ask =
        (workspace_call)(uintptr_t)(void *)GetProcAddress(library, "fdma_forward_workspace");
    const forward_call forward =
        (forward_call)(uintptr_t)(void *)GetProcAddress(library, "fdma_forward");
    size_t bytes = 0;
    fdma_forward_args args = {.size = sizeof args, .exec = {.threads = threads}};
    args.q = args.k = fdma_tensor_4d(zeros, FDMA_FLOAT32, 1, len, 1, head_dim);
    args.v = fdma_tensor_4d(v, FDMA_FLOAT32, 1, len, 1, head_dim);
    args.out = fdma_tensor_4d(out, FDMA_FLOAT32, 1, len, 1, head_dim);
    for (int n = 0; n < len * head_dim; n++)
        v[n] = 2.5F;
    if (ask == NULL || forward == NULL || ask(&args, &bytes) != FDMA_OK || bytes > sizeof workspace)
        return 0;
    args.exec.workspace = workspace;
    args.exec.workspace_size = sizeof workspace;
    if (forward(&args) != FDMA_OK)
        return 0;
    return fabsf(out[0] - 2.5F) < 1e-5F && fabsf(out[len * head_dim - 1] - 2.5F) < 1e-5F;
}

static int threads_of_process(void) {
    int count = 0;
    THREADENTRY32 entry = {.dwSize = sizeof entry};
    const HANDLE snapshot = CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0);
    for (BOOL more = Thread32First(snapshot, &entry); more; more = Thread32Next(snapshot, &entry))
        count += entry.th32OwnerProcessID == GetCurrentProcessId();
    CloseHandle(snapshot);
    return count;
}

static void calls_run_on_threads_that_outlive_the_handle(void) {
    const int alone = threads_of_process();
    for (int round = 0; round < 3; round++) {
        const HMODULE library = LoadLibraryA("libfdma.dll");
        if (!CHECK(library != NULL))
            return;
        CHECK(attends(library, 4));
        CHECK_INT(threads_of_process() - alone, 3);
        CHECK(FreeLibrary(library));
        Sleep(20); /* the threads go to sleep in code that has to stay */
    }
    CHECK_INT(threads_of_process() - alone, 3);
}

static const test_entry tests[] = {TEST(calls_run_on_threads_that_outlive_the_handle)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
