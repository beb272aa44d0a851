/* `fdma info`: what there is, and what would be chosen. */
#include "fdma.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/options.h"

#include <stdio.h>

static const command_line command = {
    .name = "fdma info",
    .about = "Prints the library's version, this machine's features, the kernels in order of\n"
             "preference, and which of them would run each type.",
};

static void print_device(void) {
    fdma_device_info device = {.size = sizeof device};
    printf("fdma       %s\n", fdma_version());
    if (fdma_describe_device(0, &device)) {
        printf("cpu        %s\n", fdma_last_error());
        return;
    }
    printf("cpu        %s, %d cores\n", device.name, device.cores);
    printf("features   %s\n", device.features[0] ? device.features : "none that kernels ask for");
#ifdef FDMA_HAVE_CJSON
    printf("files      safetensors\n");
#else
    printf("files      none: built without cJSON (libcjson-dev)\n");
#endif
}

/* The devices beside the CPU, or why there are none. */
static void print_devices(void) {
    for (int32_t d = 1; d < fdma_device_count(); d++) {
        fdma_device_info device = {.size = sizeof device};
        if (fdma_describe_device(d, &device) == FDMA_OK)
            printf("cuda %-5d %s, %s, %d multiprocessors\n", d, device.name, device.features,
                   device.cores);
        else
            printf("cuda %-5d %s\n", d, fdma_last_error());
    }
    if (fdma_device_count() == 1)
        printf("cuda       none: %s\n", why_no_device());
}

static void print_kernels(void) {
    printf("\n%-20s %-10s %s\n", "kernel", "operation", "here");
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        fdma_kernel_info kernel = {.size = sizeof kernel};
        if (fdma_describe_kernel(index, &kernel) == FDMA_OK)
            printf("%-20s %-10s %s%s\n", kernel.name, kernel.operation,
                   kernel.missing ? "no: lacks " : "yes", kernel.missing ? kernel.missing : "");
    }
}

/* Which kernel runs a plain problem: 8 heads of 128, 1024 keys. */
static void print_choice(fdma_dtype dtype, int32_t device) {
    static const int64_t heads[] = {1, 1024, 8, 128};
    const fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, 4, heads);
    const fdma_forward_args args = {
        .size = sizeof args,
        .q = tensor,
        .k = tensor,
        .v = tensor,
        .out = tensor,
        .causal = 1,
        .exec = {.device = device},
    };
    const char *name;
    if (fdma_forward_kernel(&args, &name))
        name = fdma_last_error();
    printf("%-10s %s\n", dtype_name(dtype), name);
}

static void print_choices(int32_t device) {
    static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16, FDMA_FLOAT64};
    if (device)
        printf("\nforward    on device %d would run on\n", device);
    else
        printf("\n%-10s %s\n", "forward", "would run on");
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        print_choice(dtypes[d], device);
}

int info_main(int argc, char **argv) {
    const int read = read_options(&command, argc, argv, NULL);
    if (read != OPTIONS_READ)
        return read;
    print_device();
    print_devices();
    print_kernels();
    for (int32_t device = 0; device < fdma_device_count(); device++)
        print_choices(device);
    return EXIT_DONE;
}
